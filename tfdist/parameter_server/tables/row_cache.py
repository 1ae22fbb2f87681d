"""A worker's cache of frequent rows, which it need not read from the servers in each step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tfdist import whole_numbers
from tfdist.parameter_server.tables.keyed_rows import KeyedRows

_NEVER = -(1 << 62)
_LEAST_SHARE = 8
"""An eviction frees at least one in so many rows of the cache, as it takes a pass over all of them."""


@dataclass(frozen=True)
class CachePolicy:
    """The policy of a worker's cache: which rows of an embedding it keeps, and for how long.

    A row is cached when its key is used again while it is among the ``rows`` most recently used keys. A cached row is
    used for ``staleness`` steps after the step in which it was read; a step ends with the worker's update. So updates
    of other workers are seen up to ``staleness`` steps late.

    Attributes:
        rows: the largest number of keys; at least 1. Each key takes about 50 bytes beside its row.
        staleness: age up to which cached rows are used, in steps of this worker; 0 caches no rows.
        reads_own_writes: whether the worker's own updates are seen at once. The answer to an update then brings the new
            values of cached rows: lookups are short, but no bytes are saved. Otherwise own updates are seen as late as
            those of others, and frequent rows are read once in ``staleness`` + 1 steps.
    """

    rows: int
    staleness: int
    reads_own_writes: bool = True

    def __post_init__(self) -> None:
        whole_numbers.check("rows", self.rows)
        whole_numbers.check("staleness", self.staleness, least=0)


@dataclass(frozen=True)
class CacheLookup:
    """The result of a lookup in a cache. It is valid until the cache changes.

    Attributes:
        keys: keys of the lookup, int64 [n].
        slots: slots of the keys in the cache; -1 for keys that it lacks.
        values: rows of the keys [n, dim], a new array; rows at ``missing`` have no meaning.
        missing: places, int64, of rows that have to be read from the servers.
    """

    keys: np.ndarray
    slots: np.ndarray
    values: np.ndarray
    missing: np.ndarray


class RowCache:
    """A cache of the most recently used keys, and of the rows of keys that were used again. For one thread.

    Args:
        policy: size of the cache, and the age up to which rows are used.
        dim: number of columns of the rows.
        dtype: name of the rows' dtype.

    Attributes:
        asked: the number of keys that were looked up.
        found: the number of those keys whose rows were in the cache.
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

    def find(self, keys: np.ndarray) -> CacheLookup:
        """Looks up the rows of keys, and counts this as a use of the keys.

        Args:
            keys: keys, int64 [n], distinct.
        """
        slots = self._rows.find(keys)
        is_here = slots >= 0
        known = slots[is_here]
        self._rows["used"][known] = self._clock
        is_here[is_here] = self._rows["read"][known] >= self._clock - self._policy.staleness
        values = np.empty((len(keys), self._dim), self._dtype)
        if len(known):  # NumPy refuses to take from a column without rows
            np.take(self._rows["values"], slots, axis=0, out=values, mode="clip")
        missing = np.flatnonzero(~is_here)
        self.asked += len(keys)
        self.found += len(keys) - len(missing)
        return CacheLookup(keys, slots, values, missing)

    def put(self, lookup: CacheLookup, values: np.ndarray) -> None:
        """Caches rows that were read in this step, if their keys were used before; else records the keys only.

        Args:
            lookup: result of the lookup.
            values: rows that it lacked, [missing, dim].
        """
        slots = lookup.slots[lookup.missing]
        is_known = slots >= 0
        known, new = slots[is_known], lookup.keys[lookup.missing[~is_known]][: self._policy.rows]
        self._rows["values"][known] = values[is_known]
        self._rows["read"][known] = self._clock
        self._make_room(len(new))
        self._rows.add(new, {"values": 0, "read": _NEVER, "used": self._clock})

    def written(self, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which cached rows an update changes; none if the worker does not read its own writes.

        Args:
            keys: keys of the update, int64 [n]; they may repeat.

        Returns:
            The places of cached keys among them, and the keys' slots for `end_step`; both int64.
        """
        if not self._policy.reads_own_writes:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        slots = self._rows.find(keys)
        is_here = slots >= 0
        is_here[is_here] = self._rows["read"][slots[is_here]] != _NEVER
        return np.flatnonzero(is_here), slots[is_here]

    def end_step(self, slots: np.ndarray, values: np.ndarray) -> None:
        """Writes new values of cached rows after an update, and begins the next step.

        Args:
            slots: slots from `written`; a repeated slot has the same values each time.
            values: values after the update, [n, dim].
        """
        self._rows["values"][slots] = values
        self._rows["read"][slots] = self._clock
        self._clock += 1

    def _make_room(self, new: int) -> None:
        """Evicts the least recently used keys, if there are too many."""
        surplus = len(self._rows) + new - self._policy.rows
        if surplus > 0:
            number = min(len(self._rows), max(surplus, self._policy.rows // _LEAST_SHARE))
            self._rows.remove(np.argpartition(self._rows["used"], number - 1)[:number])
