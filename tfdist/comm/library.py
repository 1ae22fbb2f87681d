"""Running an MPI library's own collectives, which it matches by their order, from ranks that have no order.

Rank 0 begins a collective as soon as it is posted there, and tells everyone, by a message with the call's own tag,
which place in the order it took. The others begin theirs in that order.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


class LibraryCollectives:
    """The collectives of one MPI communicator. Making one is collective.

    Args:
        comm: an mpi4py communicator; this takes a duplicate of its own.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._comm = comm.Dup()
        self._turns = comm.Dup()
        self._taken = itertools.count()
        self._next = 0
        self._ready: dict[int, _AllReduce] = {}
        self._operators: dict[tuple[np.ufunc, np.dtype], tuple[Any, Any]] = {}

    def all_reduce(self, buffer: np.ndarray, combine: np.ufunc, tag: int) -> _AllReduce:
        """Starts to combine the buffer over all ranks, in place; see `Communicator.receive_combined`."""
        return _AllReduce(self, buffer, combine, tag)

    def announce(self, tag: int) -> None:
        """Tells the other ranks the place of the call that this rank, the first, begins now."""
        place = np.array([next(self._taken)], np.int64)
        for rank in range(1, self._comm.size):
            self._turns.Send(place, rank, tag)

    def awaited(self, place: np.ndarray, tag: int) -> Any:
        """Starts to receive the place of a call."""
        return self._turns.Irecv(place, 0, tag)

    def arrived(self, place: int, call: _AllReduce) -> None:
        """A call knows its place; begins all whose turn has come."""
        self._ready[place] = call
        while self._next in self._ready:
            self._ready.pop(self._next).begin()
            self._next += 1

    def start(self, buffer: np.ndarray, combine: np.ufunc) -> Any:
        """Begins the library's own all-reduce."""
        datatype, operator = self._operator(combine, buffer.dtype)
        return self._comm.Iallreduce(self._mpi.IN_PLACE, [buffer.view(np.uint8), buffer.size, datatype], operator)

    def _operator(self, combine: np.ufunc, dtype: np.dtype) -> tuple[Any, Any]:
        """MPI's datatype and operator; made of the ufunc where MPI has none that treats these numbers as NumPy does."""
        if (combine, dtype) not in self._operators:
            mpi = self._mpi
            native = mpi.SUM if combine is np.add else mpi.PROD if combine is np.multiply else None
            known = dtype.isbuiltin == 1 and dtype.kind in "fiuc" and dtype != np.float16
            if native is not None and known:
                made = mpi.Datatype.fromcode(dtype.char), native
            else:
                made = (
                    mpi.BYTE.Create_contiguous(dtype.itemsize).Commit(),
                    mpi.Op.Create(_operate(combine, dtype), False),
                )
            self._operators[combine, dtype] = made
        return self._operators[combine, dtype]


def _operate(combine: np.ufunc, dtype: np.dtype) -> Any:
    def operate(given: Any, both: Any, datatype: Any) -> None:
        own, result = np.frombuffer(given, dtype), np.frombuffer(both, dtype)
        with np.errstate(all="ignore"):
            combine(own, result, out=result)

    return operate


class _AllReduce:
    """One call, from before its turn to its end."""

    def __init__(self, collectives: LibraryCollectives, buffer: np.ndarray, combine: np.ufunc, tag: int) -> None:
        self._collectives = collectives
        self._buffer = buffer
        self._combine = combine
        self._request: Any = None
        self._place = np.zeros(1, np.int64)
        self._turn: Any = None
        if collectives._comm.rank == 0:
            collectives.announce(tag)
            self.begin()
        else:
            self._turn = collectives.awaited(self._place, tag)

    def begin(self) -> None:
        """Its turn has come."""
        self._request = self._collectives.start(self._buffer, self._combine)

    def completed(self) -> bool:
        """Whether it is done; drives it on."""
        if self._turn is not None and self._turn.Test():
            self._turn = None
            self._collectives.arrived(int(self._place[0]), self)
        return self._request is not None and self._request.Test()
