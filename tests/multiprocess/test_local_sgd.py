"""Local SGD: trajectories against NumPy, everything of Keras beside it, and what becomes of failures."""

import re
import signal

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_rounds" / "local_sgd.py")
ROUNDS = ["golden", "synchronous", "uneven", "compressed", "restarted"]
KERAS = ["features", "loops", "again", "quiet", "refused"]
"""Which meet processes, however many: two are enough."""


@pytest.mark.parametrize(("size", "checks"), [(1, ["golden", "synchronous"]), (2, ROUNDS + KERAS), (3, ROUNDS)])
def test_rounds(size, checks, tmp_path):
    settings = {"TEST_CASES": ",".join(checks)}
    for end in harness.run([PROGRAM, str(tmp_path)], size, deadline=300, settings=settings):
        passed = [line.split()[1] for line in end.output.splitlines() if line.startswith("PASSED ")]
        assert passed == checks, end.output


def test_different_rounds_are_refused(tmp_path):
    with harness.started([PROGRAM, str(tmp_path)], 2, {"TEST_CASES": "mismatched"}) as processes:
        for end in processes.wait(60):
            assert end.code, end.output
            assert re.search(r"MismatchError: ranks differ in .*rank 0 has sync_every=Every\(4\)", end.output), (
                end.output
            )


def test_killed_rank_is_named(tmp_path):
    with harness.started([PROGRAM, str(tmp_path)], 3, {"TEST_CASES": "endless"}) as processes:
        processes.await_output(1, "READY")
        processes.signal(1, signal.SIGKILL)
        processes.wait(30)
        for other in (0, 2):
            assert processes.popens[other].returncode not in (0, None), processes.outputs()
            assert re.search("PeerLostError: .*rank 1, worker 1 .*died", processes.output(other)), processes.outputs()
