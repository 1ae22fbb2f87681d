"""`AllReduceStrategy(delay=1)`: trajectories against NumPy, and what Keras has beside it."""

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_rounds" / "delayed.py")
CHECKS = ["golden", "features", "callbacks", "loops", "again", "compressed", "restarted", "refused"]


@checks({1: [sweep("golden")], 2: CHECKS, 3: [*map(sweep, CHECKS)]})
def test_gradients_are_a_step_late(size, check, passes):
    passes(size, check)


def test_different_delays_are_refused(tmp_path):
    message = "MismatchError: ranks differ in .*delay=1"
    harness.assert_all_fail([PROGRAM, str(tmp_path)], message, TEST_CASES="mismatched")
