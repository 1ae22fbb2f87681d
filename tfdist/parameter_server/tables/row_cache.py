"""Frequent rows that a worker keeps, so that it need not read them from the servers in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist.parameter_server.tables.keyed_rows import KeyedRows

_NEVER = -(1 << 62)
_LEAST_SHARE = 8
"""An eviction makes room for this part of the cache at least, as it takes a pass over all of it."""


@dataclass(frozen=True)
class CachePolicy:
    """Which rows of an embedding a worker keeps, and for how long.

    A row is kept when its key comes again while it is among the ``rows`` keys that were used last. It is used for
    ``staleness`` steps after the one in which it was read; a step ends with the worker's update. So what *other*
    workers do to a row is seen up to ``staleness`` steps late. The worker's own updates are seen at once: their answer
    brings the new values of rows that are kept.

    Attributes:
        rows: the largest number of keys; at least 1. Each takes about 50 bytes beside its row.
        staleness: in steps of this worker; 0 keeps no rows.
    """

    rows: int
    staleness: int

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("staleness", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")


class RowCache:
    """The keys that a worker has used last, and the values of those that came again. For one thread.

    Args:
        policy: its size, and the age up to which values are used.
        dim: number of columns of the rows.
        dtype: of the rows.

    Attributes:
        asked: the number of keys that were looked for.
        found: the number of them whose values were here.
    """

    def __init__(self, policy: CachePolicy, dim: int, dtype: str) -> None:
        self.asked = 0
        self.found = 0
        self._policy = policy
        self._dim, self._dtype = dim, np.dtype(dtype)
        self._clock = 0
        self.clear()

    def __len__(self) -> int:
        """The number of keys."""
        return len(self._rows)

    def clear(self) -> None:
        """Forgets all keys."""
        columns = {"values": ((self._dim,), self._dtype), "read": ((), np.int64), "used": ((), np.int64)}
        self._rows = KeyedRows(columns)

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The rows of keys. It is a use of the keys.

        Args:
            keys: int64 [n], distinct.

        Returns:
            A new array [n, dim], and the places, int64, of rows that have to be read; they have no meaning yet.
        """
        slots = self._rows.find(keys)
        known = slots[slots >= 0]
        self._rows["used"][known] = self._clock
        is_here = slots >= 0
        is_here[is_here] = self._rows["read"][known] >= self._clock - self._policy.staleness
        values = np.empty((len(keys), self._dim), self._dtype)
        if len(known):  # NumPy takes nothing from a column without rows
            np.take(self._rows["values"], slots, axis=0, out=values, mode="clip")
        missing = np.flatnonzero(~is_here)
        self.asked += len(keys)
        self.found += len(keys) - len(missing)
        return values, missing

    def put(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Keeps rows that were read in this step, if their keys have been used before; else notes the keys.

        Args:
            keys: int64 [n], distinct.
            values: [n, dim].
        """
        slots = self._rows.find(keys)
        is_known = slots >= 0
        known, new = slots[is_known], keys[~is_known][: self._policy.rows]
        self._rows["values"][known] = values[is_known]
        self._rows["read"][known] = self._clock
        self._make_room(len(new))
        self._rows.add(new, {"values": 0, "read": _NEVER, "used": self._clock})

    def kept(self, keys: np.ndarray) -> np.ndarray:
        """The places of keys, int64, whose values are kept, and change with an update of them.

        Args:
            keys: int64 [n]; they may repeat.
        """
        slots = self._rows.find(keys)
        is_here = slots >= 0
        is_here[is_here] = self._rows["read"][slots[is_here]] != _NEVER
        return np.flatnonzero(is_here)

    def end_step(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Takes over what an update has made of the rows that are kept.

        Args:
            keys: int64 [n], of `kept`; they may repeat.
            values: [n, dim], after the update.
        """
        slots = self._rows.find(keys)
        self._rows["values"][slots] = values
        self._rows["read"][slots] = self._clock
        self._clock += 1

    def _make_room(self, new: int) -> None:
        """Evicts the keys that were not used for longest, if there are too many."""
        surplus = len(self._rows) + new - self._policy.rows
        if surplus > 0:
            number = min(len(self._rows), max(surplus, self._policy.rows // _LEAST_SHARE))
            self._rows.remove(np.argpartition(self._rows["used"], number - 1)[:number])
