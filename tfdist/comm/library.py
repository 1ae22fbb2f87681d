"""Runs an MPI library's own collectives, which MPI matches by order, on ranks that post them in different orders.

Rank 0 starts a collective as soon as it is posted there, and sends the others its position in the order, in a message
with the call's tag. The other ranks start theirs in that order.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np


class LibraryCollectives:
    """The collectives of an MPI communicator. The constructor is collective.

    Args:
        comm: an mpi4py communicator, which is duplicated.
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
        """Sends the other ranks the position of the call that this rank, rank 0, starts now."""
        place = np.array([next(self._taken)], np.int64)
        for rank in range(1, self._comm.size):
            self._turns.Send(place, rank, tag)

    def awaited(self, place: np.ndarray, tag: int) -> Any:
        """Starts to receive the position of a call."""
        return self._turns.Irecv(place, 0, tag)

    def arrived(self, place: int, call: _AllReduce) -> None:
        """Registers a call whose position is known, and starts all calls whose turn has come."""
        self._ready[place] = call
        while self._next in self._ready:
            self._ready.pop(self._next).begin()
            self._next += 1

    def start(self, buffer: np.ndarray, combine: np.ufunc) -> Any:
        """Starts the library's own all-reduce."""
        datatype, operator = self._operator(combine, buffer.dtype)
        return self._comm.Iallreduce(self._mpi.IN_PLACE, [buffer.view(np.uint8), buffer.size, datatype], operator)

    def _operator(self, combine: np.ufunc, dtype: np.dtype) -> tuple[Any, Any]:
        """Returns MPI's datatype and operator; made from the ufunc if MPI has none that computes as NumPy does."""
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
        operand, result = np.frombuffer(given, dtype), np.frombuffer(both, dtype)
        with np.errstate(all="ignore"):
            combine(operand, result, out=result)

    return operate


class _AllReduce:
    """One call, including the wait for its turn."""

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
        """Starts the collective, when its turn has come."""
        self._request = self._collectives.start(self._buffer, self._combine)

    def completed(self) -> bool:
        """Returns whether the call is complete; progresses it."""
        if self._turn is not None and self._turn.Test():
            self._turn = None
            self._collectives.arrived(int(self._place[0]), self)
        return self._request is not None and self._request.Test()
