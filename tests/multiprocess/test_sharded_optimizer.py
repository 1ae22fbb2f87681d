"""`AllReduceStrategy(shard="optimizer")`: plain Keras's updates, files and callbacks, with an optimizer in parts."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_parts" / "sharded.py")
CHECKS = ["memory", "memory_after_fit", "saved", "restarted", "callbacks", "loops", "compressed", "refused"]


@checks(
    {
        1: [sweep("equal"), sweep("saved")],
        2: ["equal", sweep("sweep"), *CHECKS],
        3: [sweep("equal"), "memory", *map(sweep, CHECKS[1:])],
    }
)
def test_an_optimizer_in_parts_trains_as_plain_keras(size, check, passes):
    passes(size, check)


def test_different_arguments_on_ranks_raise(tmp_path):
    message = "MismatchError: ranks differ in .*shard='optimizer'"
    harness.assert_all_fail([PROGRAM, str(tmp_path)], message, TEST_CASES="mismatched")


def test_killed_rank_is_named(tmp_path):
    harness.assert_killed_rank_is_named([PROGRAM, str(tmp_path)], TEST_CASES="endless")


def test_saving_on_one_rank_alone_is_named(tmp_path):
    message = "save, load or export of optimizers of sharded strategy 0, which all processes call"
    harness.assert_all_fail([PROGRAM, str(tmp_path)], message, TEST_CASES="alone")
