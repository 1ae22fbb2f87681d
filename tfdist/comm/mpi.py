"""Transfers by MPI, through mpi4py; large ones within a machine by reading the sender's memory.

A large transfer between two processes of a machine is a message with the location of the bytes, one copy (or one
addition) by the receiver, and a message back that the memory may be overwritten. MPI itself would copy them twice.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.comm.buffers import BufferPool
from tfdist.comm.communicator import Combine
from tfdist.comm.library import LibraryCollectives
from tfdist.comm.shared import Arena, Neighbour, Place, SharedMemory
from tfdist.errors import MismatchError

TAGS = 1 << 15
"""Tags that every MPI library provides (MPI_TAG_UB is at least 32767); most provide far more."""

LENT_BYTES = 128 << 10
"""Transfers within a machine of at least this size read the sender's memory. Below it, MPI's two copies cost less than
the two messages."""

_SEGMENT_BYTES = 4 << 20
_SEGMENT_BYTES_ON_A_LINE = 1 << 20

_NOTHING = np.zeros(0, np.uint8)


class MPICommunicator:
    """A `Communicator` over an MPI communicator.

    The constructor is collective: all ranks call it at the same time.

    Args:
        comm: an mpi4py communicator, not used elsewhere.
        arena: memory to send from, which the neighbours can read; None if they cannot.
        neighbours: by rank, the readable memory of the neighbours.
        arenas: by rank, the number of the group whose members read each other's memory.
        sums: by rank, whether it has machine code that sums in that memory; by default none has.
    """

    def __init__(
        self,
        comm: Any,
        arena: Arena | None,
        neighbours: Mapping[int, Neighbour],
        arenas: Sequence[int],
        sums: Sequence[bool] | None = None,
    ) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._returns = comm.Dup()
        self._byte = MPI.BYTE
        self._status = MPI.Status()
        self._error = MPI.Exception
        self._truncated = MPI.ERR_TRUNCATE
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.tags: int = comm.Get_attr(MPI.TAG_UB) or TAGS
        self.messages_sent = 0
        self.bytes_sent = 0
        self.nodes = _nodes(comm, MPI.COMM_TYPE_SHARED)
        # MPICH's shared memory survives a killed process; over TCP, UCX crashes the survivors and sends of OFI hang.
        self.outlives_others = len(set(self.nodes)) == 1
        self.hosts = self.nodes if simulates_hosts() else _joined(self.nodes, arenas)
        self.segment_bytes = _SEGMENT_BYTES if len(set(self.hosts)) == 1 else _SEGMENT_BYTES_ON_A_LINE
        self._library = LibraryCollectives(comm)
        self._loans = itertools.count()
        self._arena = arena
        self._pool = arena or BufferPool()
        self._neighbours = {
            other: memory for other, memory in neighbours.items() if self.hosts[other] == self.hosts[self.rank]
        }
        adders = {rank for rank in (self.rank, *self._neighbours) if sums and sums[rank]}
        self.memory = None if arena is None else SharedMemory(arena, self._neighbours, adders)

    def take(self, nbytes: int) -> np.ndarray:
        """Returns memory that the neighbours can read."""
        return self._pool.take(nbytes)

    def send(self, buffer: np.ndarray, destination: int, tag: int) -> _MPITransfer:
        """Starts to send the whole buffer to ``destination``."""
        self.messages_sent += 1
        self.bytes_sent += buffer.nbytes
        if buffer.nbytes >= LENT_BYTES and destination in self._neighbours:
            return self._lend(buffer, destination, tag)
        return _MPITransfer(self, self._comm.Isend([buffer.view(np.uint8), self._byte], destination, tag), buffer)

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> _MPITransfer:
        """Starts to fill the whole buffer from ``source``."""
        if buffer.nbytes >= LENT_BYTES and source in self._neighbours:
            return self._borrow(buffer.nbytes, source, tag, lambda lent: np.copyto(buffer, lent.view(buffer.dtype)))
        return self._receive(buffer, source, tag)

    def receive_combined(
        self, own: np.ndarray, target: np.ndarray, combine: Combine, source: int, tag: int
    ) -> _MPITransfer:
        """Starts to fill ``target`` with ``combine(own, received)``."""
        if own.nbytes >= LENT_BYTES and source in self._neighbours:
            return self._borrow(own.nbytes, source, tag, lambda lent: combine(own, lent.view(own.dtype), out=target))
        landing = _scratch.take(own.nbytes).view(own.dtype)
        return self._receive(landing, source, tag, lambda: combine(own, landing, out=target))

    def library_all_reduce(self, buffer: np.ndarray, combine: np.ufunc, tag: int) -> Any:
        """Starts the MPI library's own all-reduce, in place."""
        return self._library.all_reduce(buffer, combine, tag)

    def completed(self, requests: Sequence[Any]) -> bool:
        """Returns whether all of these transfers have completed."""
        done = True
        for request in requests:  # no early exit: a request may depend on the progress of another
            done = request.completed() and done
        return done

    def progress(self) -> None:
        """Lets MPI send the data that it has buffered."""
        self._comm.Iprobe()

    def _receive(
        self, buffer: np.ndarray, source: int, tag: int, then: Callable[[], Any] | None = None
    ) -> _MPITransfer:
        request = self._comm.Irecv([buffer.view(np.uint8), self._byte], source, tag)
        return _MPITransfer(self, request, buffer, (source, buffer.nbytes), then)

    def _lend(self, buffer: np.ndarray, destination: int, tag: int) -> _MPITransfer:
        assert self._arena is not None
        place = self._arena.find(buffer)
        if place is None:
            copy = self._arena.take(buffer.nbytes).view(buffer.dtype)
            np.copyto(copy, buffer)
            buffer, place = copy, self._arena.find(copy)
        assert place is not None
        loan = next(self._loans) % self.tags
        returned = self._returns.Irecv([_NOTHING, self._byte], destination, loan)
        notice = np.array([*place, buffer.nbytes, loan], np.int64)
        self._comm.Isend([notice, self._byte], destination, tag).Free()
        return _MPITransfer(self, returned, (notice, buffer))

    def _borrow(self, nbytes: int, source: int, tag: int, use: Callable[[np.ndarray], Any]) -> _MPITransfer:
        notice = np.empty(5, np.int64)

        def arrived() -> None:
            *place, lent_bytes, loan = notice.tolist()
            if lent_bytes != nbytes:
                raise self.differs(source, nbytes, lent_bytes)
            use(self._neighbours[source].view(Place(*place), nbytes))
            self._returns.Isend([_NOTHING, self._byte], source, loan).Free()

        return self._receive(notice.view(np.uint8), source, tag, arrived)

    def differs(self, source: int, expected: int, came: int | None) -> MismatchError:
        """Returns the error for a message of another size than expected; ``came`` is None if it was larger."""
        return MismatchError(
            f"rank {self.rank} expected {expected} bytes from rank {source}, which sent "
            f"{'more' if came is None else came}: the ranks passed data of different shapes or dtypes. "
            "Pass the same shapes and dtypes on every rank."
        )


class _MPITransfer:
    """A running transfer, and the action on its completion.

    Args:
        communicator: the communicator that started it.
        request: mpi4py's request.
        buffer: objects to keep alive until completion.
        expected: the source and the expected number of bytes; None if the other side checks.
        then: called once on completion.
    """

    __slots__ = ("_buffer", "_communicator", "_expected", "_request", "_then")

    def __init__(
        self,
        communicator: MPICommunicator,
        request: Any,
        buffer: Any,
        expected: tuple[int, int] | None = None,
        then: Callable[[], Any] | None = None,
    ) -> None:
        self._communicator = communicator
        self._request = request
        self._buffer = buffer
        self._expected = expected
        self._then = then

    def completed(self) -> bool:
        if self._request is None:
            return True
        if self._expected is None:
            if not self._request.Test():
                return False
        elif not self._arrived(*self._expected):
            return False
        if self._then is not None:
            self._then()  # if this raises, the transfer has not completed
        self._request = self._buffer = self._then = None
        return True

    def _arrived(self, source: int, nbytes: int) -> bool:
        comm = self._communicator
        try:
            if not self._request.Test(comm._status):
                return False
        except comm._error as error:
            if error.Get_error_class() == comm._truncated:
                raise comm.differs(source, nbytes, None) from None
            raise
        came = comm._status.Get_count(comm._byte)
        if came != nbytes:
            raise comm.differs(source, nbytes, came)
        return True


_scratch = BufferPool()


def simulates_hosts() -> bool:
    """Returns whether MPICH is set to treat one machine as several, as tests and benchmarks of networks do."""
    values = (os.environ.get(f"MPIR_CVAR_{name}", "") for name in ("NOLOCAL", "NUM_CLIQUES", "ODD_EVEN_CLIQUES"))
    return any(value.lower() not in ("", "0", "no", "false") for value in values)


def _nodes(comm: Any, shared: int) -> tuple[int, ...]:
    """Returns, by rank, the number of its machine, as MPI groups ranks."""
    neighbours = comm.Split_type(shared)
    first = np.array([comm.Get_rank()], np.int64)
    neighbours.Bcast(first)
    neighbours.Free()
    firsts = np.empty(comm.Get_size(), np.int64)
    comm.Allgather(first, firsts)
    return _numbered(firsts.tolist())


def _joined(nodes: Sequence[int], arenas: Sequence[int]) -> tuple[int, ...]:
    """Returns, by rank, the number of its group of ranks that share memory by MPI or by arenas."""
    groups = list(nodes)
    leaders: dict[int, int] = {}
    for rank, arena in enumerate(arenas):
        before, now = groups[rank], groups[leaders.setdefault(arena, rank)]
        if before != now:
            groups = [now if group == before else group for group in groups]
    return _numbered(groups)


def _numbered(groups: Sequence[int]) -> tuple[int, ...]:
    numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return tuple(numbers[group] for group in groups)
