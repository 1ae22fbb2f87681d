"""`AllReduceStrategy(mesh=…)`: plain Keras's updates and files, with split layers."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_parts" / "split_layers.py")
CHECKS = ["models", "second_order", "loops", "files", "few", "refused"]
MORE = ["accumulation", "restarted", "sharded", "ways"]


@checks(
    {
        2: [*CHECKS, *map(sweep, ("optimizers", *MORE))],
        4: ["optimizers", "groups", *map(sweep, ("axes", *CHECKS, *MORE))],
    }
)
def test_split_layers_train_as_plain_keras(size, check, passes):
    passes(size, check)


@pytest.mark.sweep
def test_killed_rank_is_named(tmp_path):
    harness.assert_killed_rank_is_named([PROGRAM, str(tmp_path)], TEST_CASES="endless")


def test_a_call_on_one_rank_alone_is_named(tmp_path):
    message = r"rank 0 waits in eager gather of a batch of float64 \('\*', 7\)"
    harness.assert_all_fail([PROGRAM, str(tmp_path)], message, TEST_CASES="alone")
