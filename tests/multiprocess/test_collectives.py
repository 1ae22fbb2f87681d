"""The algorithms over real MPI, and what becomes of them when a rank dies in the middle."""

import re
import signal

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep
from tfdist.collectives.algorithms import ALGORITHMS

PROGRAM = str(harness.PROGRAMS / "collectives.py")
CHECKS = ["exact", "same_bits", "in_the_librarys_order", "groups", "new_keys"]
IN_SWEEPS = [sweep(check) for check in CHECKS]

pytestmark = pytest.mark.multiprocess


@checks({2: IN_SWEEPS, 3: CHECKS, 4: IN_SWEEPS})
def test_algorithms_are_correct_over_mpi(size, check, passes):
    passes(size, check)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_killed_rank_is_named_by_every_algorithm(name):
    with harness.started([PROGRAM], 3, {"TEST_CASES": "forever", "TEST_ALGORITHM": name}) as processes:
        for rank in range(3):
            processes.await_output(rank, "READY")
        processes.signal(1, signal.SIGKILL)
        ended = processes.wait()
        for rank in (0, 2):
            assert ended[rank].code == 1, processes.outputs()
            assert re.search("ERROR PeerLostError rank 1, worker 1 .*died", ended[rank].output), processes.outputs()
    harness.assert_nothing_left()


@pytest.mark.parametrize("cliques", [sweep("2"), "4"])
def test_algorithms_are_correct_on_several_mpi_cliques(cliques):
    settings = {"TEST_CASES": ",".join(CHECKS), "MPIR_CVAR_NUM_CLIQUES": cliques}
    for end in harness.run([PROGRAM], 4, settings):
        assert "DONE" in end.output


def failed_with_mismatch(check, **settings):
    with harness.started([PROGRAM], 2, {"TEST_CASES": check, **settings}) as processes:
        ended = processes.wait()
        assert all(end.code == 1 for end in ended), processes.outputs()
        outputs = processes.outputs()
    harness.assert_nothing_left()
    return outputs


def test_ranks_that_call_different_collectives():
    outputs = failed_with_mismatch("different")
    assert outputs.count("MismatchError: ranks take part in different collectives") == 2, outputs
    assert "rank 0 waits in sum of rank 0; rank 1 waits in sum of rank 1" in outputs


def test_ranks_that_call_different_collectives_which_both_know():
    outputs = failed_with_mismatch("different_later")
    assert outputs.count("MismatchError: ranks take part in different collectives") == 2, outputs
    assert "rank 0 waits in sum; rank 1 waits in other sum" in outputs


@pytest.mark.parametrize("elements", [10, 100_000])
def test_different_data_sizes_raise(elements):
    outputs = failed_with_mismatch("different_sizes", TEST_SIZES=str(elements))
    assert "MismatchError: sum: rank" in outputs, outputs
    assert f"expected {8 * elements} bytes from rank 1, which sent" in outputs, outputs


def test_a_rank_that_is_late_is_named_and_the_job_goes_on():
    with harness.started([PROGRAM], 3, {"TEST_CASES": "late,exact", "TFDIST_STALL_TIMEOUT": "1"}) as processes:
        for rank, end in enumerate(processes.wait()):
            assert end.code == 0, processes.outputs()
            told = end.output
            assert "rank 0 has posted a sum that one is late for (call 1: kernel, bias); missing: rank 1." in told
            assert "rank 2 has posted a sum that one is late for (call 2: kernel, bias); missing: rank 1." in told
            assert "DONE" in told, processes.outputs()
            assert "is in no collective; it has not posted a sum that one is late for." in told, rank
    harness.assert_nothing_left()
