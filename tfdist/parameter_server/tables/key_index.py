"""A map from int64 keys to slots: a hash table in NumPy, whose operations take many keys at once."""

from __future__ import annotations

import numpy as np

from tfdist.parameter_server.options.key_hash import mix

_EMPTY, _REMOVED = -1, -2
"""Marks of a bucket without a slot. A search ends at an empty bucket, and goes on after that of a removed key."""

_LEAST_BUCKETS = 16
_MOST_SLOTS = (1 << 31) - 1


class KeyIndex:
    """A hash table of distinct keys, which have the slots 0 to ``size`` − 1. Any int64 is a key.

    Open addressing with triangular probing. A batch of keys is probed together, in as many rounds as the key that is
    found last takes; the table is at most half full. A key takes 8 bytes, and 8 to 24 for its buckets.

    Attributes:
        size: the number of keys.
        keys: keys by slot, int64; elements from ``size`` on have no meaning.
    """

    def __init__(self) -> None:
        self.size = 0
        self.keys = np.empty(_LEAST_BUCKETS, np.int64)
        self._buckets = np.full(_LEAST_BUCKETS, _EMPTY, np.int32)
        self._used = 0  # at least the number of buckets that are not empty

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the slots of keys.

        Args:
            keys: keys, int64 [n]; they may repeat.

        Returns:
            The slots, int64 [n]; −1 for keys that are not here.
        """
        return self._search(keys)[0]

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Adds keys in the next free slots.

        Args:
            keys: keys, int64 [n], distinct, and not here yet.

        Returns:
            The slots of the keys, in ascending order from the old ``size`` on.

        Raises:
            OverflowError: there would be more than 2³¹ − 1 keys.
        """
        begin, end = self.size, self.size + len(keys)
        if end > _MOST_SLOTS:
            raise OverflowError(f"{end} keys; one server holds at most {_MOST_SLOTS}. Use more servers.")
        if end > len(self.keys):
            self.keys = grown(self.keys, end)
        self.keys[begin:end] = keys
        self.size = end
        self._used += len(keys)
        slots = np.arange(begin, end)
        if 2 * self._used > len(self._buckets):
            self._rebuild()
        else:
            self._enter(slots)
        return slots

    def remove(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Removes keys, and moves the keys of the last slots to the free slots.

        Args:
            slots: distinct slots of the keys.

        Returns:
            The slots that are filled again, and the slots beyond the new ``size`` that their keys come from.
        """
        stays = np.ones(self.size, np.bool_)
        stays[slots] = False
        size = self.size - len(slots)
        holes = np.flatnonzero(~stays[:size])
        movers = size + np.flatnonzero(stays[size:])
        self._buckets[self._search(self.keys[slots])[1]] = _REMOVED
        self._buckets[self._search(self.keys[movers])[1]] = holes
        self.keys[holes] = self.keys[movers]
        self.size = size
        return holes, movers

    def _search(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slots of keys, −1 for keys that are not here; and the buckets at which the searches ended."""
        at = self._first(keys)
        slots = self._buckets.take(at)
        left = np.flatnonzero(self._goes_on(slots, keys))
        step = 1
        while len(left):
            there = self._next(at.take(left), step)
            seen = self._buckets.take(there)
            at[left], slots[left] = there, seen
            left = left[self._goes_on(seen, keys.take(left))]
            step += 1
        return slots.astype(np.int64), at

    def _goes_on(self, slots: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """Returns whether a search goes on after a bucket with this slot: that of another key, or of a removed key."""
        is_other = self.keys.take(slots, mode="clip") != keys
        return (slots != _EMPTY) & (is_other | (slots == _REMOVED))

    def _enter(self, slots: np.ndarray) -> None:
        """Enters slots whose keys have no bucket into free buckets."""
        at = self._first(self.keys.take(slots))
        step = 1
        while len(slots):
            is_free = self._buckets.take(at) < 0
            self._buckets[at[is_free]] = slots[is_free]  # of several keys for one bucket the last gets it
            goes_on = np.flatnonzero(self._buckets.take(at) != slots)
            slots, at = slots.take(goes_on), self._next(at.take(goes_on), step)
            step += 1

    def _rebuild(self) -> None:
        """Makes new buckets, at least three per key, so that the next rebuild is at least size / 2 additions away."""
        number = max(_LEAST_BUCKETS, 1 << (3 * self.size - 1).bit_length())
        self._buckets = np.full(number, _EMPTY, np.int32)
        self._used = self.size
        self._enter(np.arange(self.size))

    def _first(self, keys: np.ndarray) -> np.ndarray:
        return (mix(keys) & np.uint64(len(self._buckets) - 1)).astype(np.int64)

    def _next(self, at: np.ndarray, step: int) -> np.ndarray:
        """Returns the buckets to probe next. Steps that grow by one reach every bucket of a power-of-two number."""
        return (at + step) & (len(self._buckets) - 1)


def grown(array: np.ndarray, rows: int) -> np.ndarray:
    """Returns a copy with room for more rows: at least twice as many as before, so that growing is amortized.

    Args:
        array: array to copy.
        rows: least number of rows of the copy.
    """
    larger = np.empty((max(rows, 2 * len(array)), *array.shape[1:]), array.dtype)
    larger[: len(array)] = array
    return larger
