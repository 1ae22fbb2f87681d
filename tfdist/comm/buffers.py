"""Aligned buffers that are used again when nobody looks at them any more."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

ALIGNMENT = 64
"""Bytes. What TensorFlow asks of memory that it takes over without a copy."""

_SMALLEST = 1 << 12


class BufferPool:
    """Hands out memory, and takes it back when the last view of it is gone.

    TensorFlow keeps a buffer as long as a tensor stands on it; so a result that the user holds stays intact, and
    one that is consumed returns here and saves the next step from page faults.
    """

    def __init__(self) -> None:
        # No lock: memory may come back while the garbage collector runs in the middle of `take`.
        self._free: dict[int, deque[np.ndarray]] = {}

    def take(self, nbytes: int) -> np.ndarray:
        """An aligned array of ``nbytes`` bytes, uninitialized, whose views keep it from being used again."""
        # Eight sizes between powers of two: vectors of ever other sizes do not each keep memory of their own.
        step = max(_SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
        room = max(step, -(-nbytes // step) * step)
        try:
            raw = self._free.setdefault(room, deque()).pop()
        except IndexError:
            raw = self._allocate(room + ALIGNMENT)
        start = -raw.ctypes.data % ALIGNMENT
        # NumPy lets every slice refer to the array made here, because its own base is no array; so this one
        # lives as long as the last view.
        lease = np.frombuffer(memoryview(raw.data)[start : start + nbytes], np.uint8)
        weakref.finalize(lease, self._give_back, room, raw).atexit = False
        return lease

    def _allocate(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def _give_back(self, room: int, raw: np.ndarray) -> None:
        self._free[room].append(raw)
