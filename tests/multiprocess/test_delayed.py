"""`AllReduceStrategy(delay=1)`: trajectories against NumPy, and what Keras has beside it."""

import re

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_rounds" / "delayed.py")
CHECKS = ["golden", "features", "loops", "again", "compressed", "restarted", "refused"]


@pytest.mark.parametrize(("size", "checks"), [(1, ["golden"]), (2, ["golden", "refused"]), (3, CHECKS)])
def test_gradients_are_a_step_late(size, checks, tmp_path):
    settings = {"TEST_CASES": ",".join(checks)}
    for end in harness.run([PROGRAM, str(tmp_path)], size, deadline=200, settings=settings):
        passed = [line.split()[1] for line in end.output.splitlines() if line.startswith("PASSED ")]
        assert passed == checks, end.output
    harness.assert_nothing_left()


def test_different_delays_are_refused(tmp_path):
    with harness.started([PROGRAM, str(tmp_path)], 2, {"TEST_CASES": "mismatched"}) as processes:
        for end in processes.wait(60):
            assert end.code, end.output
            assert re.search(r"MismatchError: ranks differ in .*delay=1", end.output), end.output
