"""Local SGD: trajectories against NumPy, everything of Keras beside it, and what becomes of failures."""

import re
import signal

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
    {1: [sweep("synchronous"), sweep("golden")], 2: ROUNDS + KERAS, 3: ["uneven", *map(sweep, ("golden", *ON_TWO))]}
)
def test_local_sgd_trains_on_several_processes(size, check, passes):
    passes(size, check)


def test_different_rounds_are_refused(tmp_path):
    with harness.started([PROGRAM, str(tmp_path)], 2, {"TEST_CASES": "mismatched"}) as processes:
        for end in processes.wait():
            assert end.code, end.output
            assert re.search(r"MismatchError: ranks differ in .*rank 0 has sync_every=Every\(4\)", end.output), (
                end.output
            )


def test_killed_rank_is_named(tmp_path):
    with harness.started([PROGRAM, str(tmp_path)], 3, {"TEST_CASES": "endless"}) as processes:
        processes.await_output(1, "READY")
        processes.signal(1, signal.SIGKILL)
        processes.wait()
        for other in (0, 2):
            assert processes.popens[other].returncode not in (0, None), processes.outputs()
            assert re.search("PeerLostError: .*rank 1, worker 1 .*died", processes.output(other)), processes.outputs()
