"""What stands on each function of Keras and TensorFlow is what `standing.txt` says, whichever feature came first."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multiprocess import harness
from tfdist.seams import order, signatures

pytestmark = pytest.mark.multiprocess

LISTED = Path(__file__).with_name("standing.txt")
PROGRAM = """
import sys

from tfdist.model_parallel import keras_placement
from tfdist.optimizers import keras_optimizers
from tfdist.pipeline import keras_pipelines
from tfdist.seams import optimizer, registry, trainer
from tfdist.strategies.all_reduce import keras_delayed
from tfdist.strategies.embeddings import keras_embeddings
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.rounds import keras_quorum, keras_rounds
from tfdist.strategies import keras_unsynchronized
from tfdist.strategies.servers import keras_servers, keras_shared_data, sidecar_evaluator

parts = [keras_seams, keras_delayed, keras_rounds, keras_quorum, keras_servers, keras_shared_data, sidecar_evaluator]
parts += [keras_embeddings, keras_optimizers, keras_pipelines, keras_placement]
installs = [*(part.install for part in parts), keras_unsynchronized.warn_in_fit]
for install in installs if sys.argv[1] == "strategies" else installs[::-1]:
    install()
for name, wrappers in sorted(registry.standing().items()):
    hooks = (trainer.points.standing() | optimizer.points.standing()).get(name, [])
    print(name, *(f"    {one}" for one in wrappers), *(f"        {one}" for one in hooks), sep="\\n")
"""


@pytest.mark.parametrize("first", ["strategies", "device scopes"])
def test_what_stands_on_each_function(first):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, first],
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == LISTED.read_text(), "if that is meant to be, write it into the file"


def test_all_that_is_listed_has_a_place_and_known_parameters():
    lines = LISTED.read_text().splitlines()
    names, wrappers = ([line.strip() for line in lines if line.startswith(" ") == inner] for inner in (False, True))
    assert set(names) == set(signatures._PARAMETERS)
    places = {place.removeprefix("tfdist.") for place in order._PLACES}
    assert not [one for one in wrappers if not any(one.startswith(f"{place}.") for place in places)]
    unused = {place for place in places if not any(one.startswith(f"{place}.") for one in wrappers)}
    assert not unused
