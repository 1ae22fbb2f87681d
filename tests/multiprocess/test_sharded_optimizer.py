"""`AllReduceStrategy(shard="optimizer")`: plain Keras's updates, files and callbacks, with an optimizer in parts."""

import re
import signal

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "in_rounds" / "sharded.py")
CHECKS = ["memory", "saved", "restarted", "callbacks", "loops", "refused"]


@checks(
    {
        1: [sweep("equal"), sweep("saved")],
        2: [sweep("equal"), sweep("sweep"), *CHECKS],
        3: ["equal", *map(sweep, CHECKS)],
    }
)
def test_an_optimizer_in_parts_trains_as_plain_keras(size, check, passes):
    passes(size, check)


def test_different_arguments_on_ranks_raise(tmp_path):
    with harness.started([PROGRAM, str(tmp_path)], 2, {"TEST_CASES": "mismatched"}) as processes:
        for end in processes.wait():
            assert end.code, end.output
            assert re.search(r"MismatchError: ranks differ in .*shard='optimizer'", end.output), end.output


def test_killed_rank_is_named(tmp_path):
    with harness.started([PROGRAM, str(tmp_path)], 3, {"TEST_CASES": "endless"}) as processes:
        processes.await_output(1, "READY")
        processes.signal(1, signal.SIGKILL)
        processes.wait()
        for other in (0, 2):
            assert processes.popens[other].returncode not in (0, None), processes.outputs()
            assert re.search("PeerLostError: .*rank 1, worker 1 .*died", processes.output(other)), processes.outputs()
