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
    ``staleness`` steps after the one in which it was read; a step ends with the worker's update. So what other workers
    do to a row is seen up to ``staleness`` steps late.

    Attributes:
        rows: the largest number of keys; at least 1. Each takes about 50 bytes beside its row.
        staleness: in steps of this worker; 0 keeps no rows.
        reads_own_writes: whether the worker's own updates are seen at once: the answer to an update then brings the new
            values of rows that are kept, so that lookups are short, but no bytes are saved. Otherwise own updates are
            seen as late as those of others, and frequent rows are read once in ``staleness`` + 1 steps.
    """

    rows: int
    staleness: int
    reads_own_writes: bool = True

    def __post_init__(self) -> None:
        for name, least in (("rows", 1), ("staleness", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}; got {value!r}")


@dataclass(frozen=True)
class Found:
    """What a cache knows of keys. It is valid until the cache changes.

    Attributes:
        keys: int64 [n].
        slots: of them; -1 for keys that are not here.
        values: their rows [n, dim], a new array; those at ``missing`` have no meaning.
        missing: the places, int64, of rows that have to be read.
    """

    keys: np.ndarray
    slots: np.ndarray
    values: np.ndarray
    missing: np.ndarray


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

    def find(self, keys: np.ndarray) -> Found:
        """The rows of keys. It is a use of the keys.

        Args:
            keys: int64 [n], distinct.
        """
        slots = self._rows.find(keys)
        is_here = slots >= 0
        known = slots[is_here]
        self._rows["used"][known] = self._clock
        is_here[is_here] = self._rows["read"][known] >= self._clock - self._policy.staleness
        values = np.empty((len(keys), self._dim), self._dtype)
        if len(known):  # NumPy takes nothing from a column without rows
            np.take(self._rows["values"], slots, axis=0, out=values, mode="clip")
        missing = np.flatnonzero(~is_here)
        self.asked += len(keys)
        self.found += len(keys) - len(missing)
        return Found(keys, slots, values, missing)

    def put(self, found: Found, values: np.ndarray) -> None:
        """Keeps rows that were read in this step, if their keys have been used before; else notes the keys.

        Args:
            found: of a lookup.
            values: [missing, dim].
        """
        slots = found.slots[found.missing]
        is_known = slots >= 0
        known, new = slots[is_known], found.keys[found.missing[~is_known]][: self._policy.rows]
        self._rows["values"][known] = values[is_known]
        self._rows["read"][known] = self._clock
        self._make_room(len(new))
        self._rows.add(new, {"values": 0, "read": _NEVER, "used": self._clock})

    def written(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which rows that are kept an update changes; none if the worker does not read its own writes.

        Args:
            keys: int64 [n], of the update; they may repeat.

        Returns:
            The places of these keys, and their slots, for `end_step`: int64.
        """
        if not self._policy.reads_own_writes:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        slots = self._rows.find(keys)
        is_here = slots >= 0
        is_here[is_here] = self._rows["read"][slots[is_here]] != _NEVER
        return np.flatnonzero(is_here), slots[is_here]

    def end_step(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Takes over what an update has made of the rows that are kept.

        Args:
            slots: of `written`; those of keys that repeat have the same values.
            values: [n, dim], after the update.
        """
        self._rows["values"][slots] = values
        self._rows["read"][slots] = self._clock
        self._clock += 1

    def _make_room(self, new: int) -> None:
        """Evicts the keys that were not used for longest, if there are too many."""
        surplus = len(self._rows) + new - self._policy.rows
        if surplus > 0:
            number = min(len(self._rows), max(surplus, self._policy.rows // _LEAST_SHARE))
            self._rows.remove(np.argpartition(self._rows["used"], number - 1)[:number])
