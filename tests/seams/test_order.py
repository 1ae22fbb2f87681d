"""What stands on each function of Keras and TensorFlow is what `standing.txt` says, whichever feature came first."""

from pathlib import Path

import pytest

from tests.multiprocess import harness
from tfdist.seams import order, signatures

pytestmark = pytest.mark.multiprocess

LISTED = Path(__file__).with_name("standing.txt")
REMEDY = "if that is meant to be, run: python -m tests.seams.standing > tests/seams/standing.txt"


@pytest.mark.parametrize("arguments", [(), ("backwards",)])
def test_installed_wrappers_equal_the_list(arguments):
    (ended,) = harness.run([str(LISTED.with_name("standing.py")), *arguments], 1)
    assert ended.output == LISTED.read_text(), REMEDY


def test_all_that_is_listed_has_a_place_and_known_parameters():
    lines = LISTED.read_text().splitlines()
    names, wrappers = ([line.strip() for line in lines if line.startswith(" ") == inner] for inner in (False, True))
    assert set(names) == set(signatures._PARAMETERS)
    places = {place.removeprefix("tfdist.") for place in order._PLACES}
    assert not [wrapper for wrapper in wrappers if not any(wrapper.startswith(f"{place}.") for place in places)]
    unused = {place for place in places if not any(wrapper.startswith(f"{place}.") for wrapper in wrappers)}
    assert not unused


def test_a_module_of_tfdist_without_a_place_is_an_error():
    assert order.place_of("somebody.elses") > order.place_of("tfdist.model_parallel.keras_placement_saving")
    with pytest.raises(LookupError, match=r"tfdist\.strategies\.keras\.keras_new .*no place in tfdist/seams/order"):
        order.place_of("tfdist.strategies.keras.keras_new")
