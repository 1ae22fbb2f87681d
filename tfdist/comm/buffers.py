"""Pool of aligned buffers that are reused once nothing refers to them."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from tfdist.comm.page_locks import page_locks

ALIGNMENT = 64
"""Alignment in bytes that TensorFlow requires of memory that it uses without a copy."""

_SMALLEST = 1 << 12


class BufferPool:
    """Allocates memory, and reuses it when its last view is deleted.

    TensorFlow keeps a buffer alive as long as a tensor uses it. So a result that the user holds stays intact, and the
    memory of a released one returns to the pool, which saves page faults in the next step.
    """

    def __init__(self) -> None:
        # No lock: memory may be returned by the garbage collector in the middle of `take`.
        self._free: dict[int, deque[memoryview]] = {}
        self._loans: set[_Loan] = set()

    def take(self, nbytes: int) -> np.ndarray:
        """Returns an aligned, uninitialized array of ``nbytes`` bytes; it is not reused while views of it exist."""
        # Eight size classes per power of two, so that vectors of slightly different sizes share memory.
        step = max(_SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
        room = max(step, -(-nbytes // step) * step)
        free = self._free.get(room) or self._free.setdefault(room, deque())
        try:
            memory = free.pop()
        except IndexError:
            raw = self._allocate(room + ALIGNMENT)
            page_locks.lock(raw)
            start = -raw.ctypes.data % ALIGNMENT
            memory = raw.data[start : start + room]
        # The base of every slice is the array made here, because its own base is not an array. So it lives as long
        # as the last view.
        lease = np.frombuffer(memory, np.uint8, nbytes)
        loan = _Loan(lease, self._returned)
        loan.memory, loan.free = memory, free
        self._loans.add(loan)
        return lease

    def _returned(self, loan: _Loan) -> None:
        self._loans.discard(loan)
        loan.free.append(loan.memory)

    def _allocate(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)


class _Loan(weakref.ref[np.ndarray]):  # takes a third of the time of a `weakref.finalize`
    """Reference to an array, with the memory to return to the pool when the array is gone."""

    __slots__ = ("free", "memory")
    __hash__ = object.__hash__  # arrays have no hash

    memory: memoryview
    free: deque[memoryview]
