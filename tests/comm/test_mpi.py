"""MPI within one process that sends to itself; several processes are in tests/multiprocess/test_collectives.py."""

import re

import ml_dtypes
import numpy as np
import pytest

from tests.comm.communicators import finish, over_mpi
from tests.comm.mpi_process import mpi_process
from tfdist.comm import mpi as comm_mpi
from tfdist.comm.mpi import LENT_BYTES, MPICommunicator
from tfdist.errors import MismatchError


def transfer(lends, sent, expected, combined=False):
    communicator = over_mpi(lends)
    buffer = np.zeros(expected, np.uint8)
    request = (
        communicator.receive_combined(buffer, buffer, np.add, 0, 1) if combined else communicator.receive(buffer, 0, 1)
    )
    finish(communicator, request, communicator.send(np.ones(sent, np.uint8), 0, 1))
    return int(buffer.sum())


@pytest.mark.parametrize("combined", [True, False])
@pytest.mark.parametrize("lends", [True, False])
@pytest.mark.parametrize(
    ("sent", "expected", "came"),
    [(9, 10, "9"), (11, 10, "more"), (LENT_BYTES, LENT_BYTES + 1, str(LENT_BYTES)), (0, 1, "0")],
)
def test_message_of_unexpected_size_raises_mismatch_error(mpi, lends, sent, expected, came, combined):
    words = f"rank 0 expected {expected} bytes from rank 0, which sent {came}: the ranks passed data of different"
    with pytest.raises(MismatchError, match=re.escape(words)):
        mpi(transfer, lends, sent, expected, combined)


def lent():
    """Where bytes are lent, MPI carries no more than the messages about them."""
    communicator = over_mpi(lends=True)
    carried = []
    isend = communicator._comm.Isend

    class Counting:
        def __getattr__(self, name):
            return getattr(inner, name)

        def Isend(self, message, *rest):
            carried.append(message[0].nbytes)
            return isend(message, *rest)

    inner, communicator._comm = communicator._comm, Counting()
    elsewhere = np.full(LENT_BYTES, 3, np.uint8)
    lendable = communicator.take(LENT_BYTES)
    lendable[...] = 4
    targets = [np.empty(LENT_BYTES, np.uint8) for _ in range(2)]
    for given, buffer in zip((elsewhere, lendable), targets, strict=True):
        finish(communicator, communicator.receive(buffer, 0, 1), communicator.send(given, 0, 1))
    small = np.zeros(LENT_BYTES - 1, np.uint8)
    finish(communicator, communicator.receive(small.copy(), 0, 1), communicator.send(small, 0, 1))
    return carried, [set(buffer.tolist()) for buffer in targets]


def test_large_transfers_on_one_host_bypass_mpi(mpi):
    """Also of memory that the neighbour cannot read, which is copied to where it can."""
    carried, contents = mpi(lent)
    assert carried[2] == LENT_BYTES - 1
    assert max(carried[:2]) < 100
    assert contents == [{3}, {4}]


def return_before_it_is_read():
    communicator = over_mpi(lends=True)
    given = np.zeros(LENT_BYTES, np.uint8)
    request = communicator.send(given, 0, 1)
    before = [communicator.completed([request]) for _ in range(1000)]
    finish(communicator, communicator.receive(np.empty_like(given), 0, 1), request)
    return any(before)


def test_lent_buffer_completes_only_after_it_is_read(mpi):
    assert mpi(return_before_it_is_read) is False


def world():
    communicator = over_mpi()
    return communicator.hosts, communicator.nodes, communicator.outlives_others, communicator.tags


def test_a_process_alone_is_one_host(mpi):
    hosts, nodes, outlives_others, tags = mpi(world)
    assert (hosts, nodes, outlives_others) == ((0,), (0,), True)
    assert tags >= comm_mpi.TAGS - 1  # what the standard promises


def segment_bytes():
    return over_mpi().segment_bytes


def test_segments_on_one_machine_are_larger_than_on_a_line(mpi):
    assert mpi(segment_bytes) > comm_mpi._SEGMENT_BYTES_ON_A_LINE


def library_sum(dtype, combine):
    communicator = over_mpi()
    buffer = np.array([3, 1, 0, 1]).astype(dtype)
    call = communicator.library_all_reduce(buffer, combine, 5)
    finish(communicator, call)
    return buffer


@pytest.mark.parametrize("combine", [np.add, np.maximum])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.int8])
def test_the_librarys_own_all_reduce_of_one_rank_changes_nothing(mpi, dtype, combine):
    result = mpi(library_sum, dtype, combine)
    assert result.dtype == dtype
    assert result.astype(int).tolist() == [3, 1, 0, 1]


@pytest.mark.parametrize(
    ("name", "value", "simulates"),
    [("NOLOCAL", "1", True), ("NOLOCAL", "no", False), ("NUM_CLIQUES", "2", True), ("NUM_CLIQUES", "0", False),
     ("ODD_EVEN_CLIQUES", "True", True), ("ODD_EVEN_CLIQUES", "False", False), ("NOLOCAL", "", False)],
)  # fmt: skip
def test_simulated_hosts_are_detected_from_mpich_variables(monkeypatch, name, value, simulates):
    for other in ("NOLOCAL", "NUM_CLIQUES", "ODD_EVEN_CLIQUES"):
        monkeypatch.delenv(f"MPIR_CVAR_{other}", raising=False)
    assert not comm_mpi.simulates_hosts()
    monkeypatch.setenv(f"MPIR_CVAR_{name}", value)
    assert comm_mpi.simulates_hosts() is simulates


@pytest.mark.parametrize(
    ("nodes", "arenas", "hosts"),
    [
        ((0, 0, 1, 1), (0, 0, 2, 2), (0, 0, 1, 1)),  # both find the same machines
        ((0, 1, 2, 3), (0, 0, 2, 2), (0, 0, 1, 1)),  # containers of one machine that MPI takes for several
        ((0, 0, 1, 1), (0, 1, 2, 3), (0, 0, 1, 1)),  # memory that cannot be read
        ((0, 0, 1, 2), (0, 1, 1, 3), (0, 0, 0, 1)),  # the one joins 0 to 1, the other 1 to 2
        ((0, 1, 0, 1), (0, 1, 2, 3), (0, 1, 0, 1)),
        ((0, 1, 2), (0, 1, 0), (0, 1, 0)),
    ],
)
def test_ranks_sharing_nodes_or_arenas_form_one_host(nodes, arenas, hosts):
    assert comm_mpi._joined(nodes, arenas) == hosts


def neighbours_of_simulated_hosts():
    communicator = over_mpi(lends=True)
    return communicator.hosts == communicator.nodes, sorted(communicator._neighbours)


def test_simulated_hosts_override_detected_shared_memory():
    with mpi_process({"MPIR_CVAR_NOLOCAL": "1"}) as call:
        assert call(neighbours_of_simulated_hosts) == (True, [0])


def test_mismatch_message_names_ranks_and_sizes():
    communicator = MPICommunicator.__new__(MPICommunicator)
    communicator.rank = 2
    assert "rank 2 expected 8 bytes from rank 1, which sent 4:" in str(communicator.differs(1, 8, 4))
    assert "which sent more:" in str(communicator.differs(1, 8, None))
