"""The algorithms over real MPI, and what becomes of them when a rank dies in the middle."""

import signal

import pytest

from tests.multiprocess import harness
from tests.multiprocess.test_failures import NOTICE_SECONDS, noticed_after
from tfdist.collectives.algorithms import ALGORITHMS

PROGRAM = [str(harness.PROGRAMS / "collectives.py")]

pytestmark = pytest.mark.multiprocess


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_algorithm(size):
    for end in harness.run(PROGRAM, size):
        assert "DONE" in end.output


@pytest.mark.parametrize("name", ALGORITHMS)
def test_death_in_the_middle(name):
    with harness.started(PROGRAM, 3, {"TEST_ALGORITHM": name}) as processes:
        for rank in range(3):
            processes.await_output(rank, "READY")
        killed = processes.signal(1, signal.SIGKILL)
        ended = processes.wait(30)
        for rank in (0, 2):
            assert ended[rank].code == 1, processes.outputs()
            assert "ERROR PeerLostError rank 1, worker 1" in ended[rank].output, processes.outputs()
            assert noticed_after(ended[rank].output, killed) < NOTICE_SECONDS
    harness.assert_nothing_left()


def test_ranks_that_call_different_collectives():
    with harness.started(PROGRAM, 2, {"TEST_DIFFERENT": "1"}) as processes:
        for end in processes.wait(30):
            assert end.code == 1, processes.outputs()
            assert "MismatchError: ranks take part in different collectives" in end.output, processes.outputs()
            assert "rank 0 waits in sum of rank 0; rank 1 waits in sum of rank 1" in end.output, processes.outputs()
    harness.assert_nothing_left()
