"""Local SGD: trajectories against NumPy, everything of Keras beside it, and what becomes of failures."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_rounds" / "local_sgd.py")
ROUNDS = ["golden", "synchronous", "uneven", "compressed", "restarted"]
KERAS = ["features", "loops", "stopped", sweep("again"), sweep("quiet"), "refused"]
"""Which meet processes, however many: two are enough."""
ON_TWO = ["synchronous", "compressed", "restarted"]


@checks(
    {1: [sweep("synchronous"), sweep("golden")], 2: ROUNDS + KERAS, 3: [*map(sweep, ("uneven", "golden", *ON_TWO))]}
)
def test_local_sgd_trains_on_several_processes(size, check, passes):
    passes(size, check)


def test_different_rounds_are_refused(tmp_path):
    message = r"MismatchError: ranks differ in .*rank 0 has sync_every=Every\(4\)"
    harness.assert_all_fail([PROGRAM, str(tmp_path)], message, TEST_CASES="mismatched")


def test_killed_rank_is_named(tmp_path):
    harness.assert_killed_rank_is_named([PROGRAM, str(tmp_path)], TEST_CASES="endless")
