"""Memory that a server makes and workers on its machine map: variables, and notes of what each worker has changed.

There are no locks. Each worker has a *place*, to which it alone writes: the number of updates that it has made, by
their staleness, and a ring of the rows that it has changed, which tells the others what to read again.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import numpy as np

from tfdist.parameter_server.protocol import anonymous_memory
from tfdist.parameter_server.protocol.anonymous_memory import HEAD_BYTES, MemoryLocation
from tfdist.parameter_server.protocol.gradients import Shapes

PLACES = 64
"""Number of places in the memory; the first one is the server's."""
DELAYS = 64
"""Number of staleness values that are counted apart; higher ones count as the highest."""
RING = 1 << 17
"""Number of rows that a ring holds. A worker that has missed more than half as many reads whole variables."""

_ALIGNMENT = 64
_ROW_BITS = 40
_WHOLE = (1 << _ROW_BITS) - 1
"""Number that stands for all rows, in place of a row."""


class Memory:
    """The mapped memory.

    Args:
        mapped: mapped memory of `size_of` bytes.
        where: location at which other processes find it.
        shapes: the shard's variables.

    Attributes:
        where, shapes: the arguments of these names.
        arrays: values of the variables.
        counts: number of updates, by place and staleness, int64 of shape ``(PLACES, DELAYS)``.
        heads: by place, the number of rows that were ever written to its ring, int64.
        rings: by place, the last of these rows, int64 of shape ``(PLACES, RING)``.
    """

    def __init__(self, mapped: mmap.mmap, where: MemoryLocation, shapes: Shapes) -> None:
        self.where = where
        self.shapes = shapes
        self._bytes = np.frombuffer(mapped, np.uint8)
        views = [
            self._bytes[begin : begin + prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            for begin, shape, dtype in zip(_places(shapes)[:-1], _shapes(shapes), _dtypes(shapes), strict=True)
        ]
        self.counts, self.heads, self.rings, *self.arrays = views

    @classmethod
    def make(cls, shapes: Shapes) -> Memory:
        """Makes memory that is filled with zeros.

        Args:
            shapes: the shard's variables.

        Raises:
            OSError: this system does not support such memory, or has none left.
        """
        return cls(*anonymous_memory.make(size_of(shapes), is_reserved=False), shapes)

    @classmethod
    def open(cls, where: MemoryLocation, shapes: Shapes) -> Memory | None:
        """Maps memory that a server has made.

        Args:
            where: location that the server has sent.
            shapes: the shard's variables.

        Returns:
            The memory; None if this process cannot open it; see `anonymous_memory.open_memory`.
        """
        memory = anonymous_memory.open_memory(where, size_of(shapes))
        return None if memory is None else cls(memory, where, shapes)

    def updates(self) -> int:
        """Returns the number of updates that workers have made."""
        return int(self.counts.sum())


class Writer:
    """Changes variables in the memory for one process, notes the changes in its place, and reads the others' notes.

    Args:
        memory: memory of a server.
        place: number of this process's place.
    """

    def __init__(self, memory: Memory, place: int) -> None:
        self.memory = memory
        self._place = place
        self._seen = memory.heads.copy()
        self._updates = memory.updates()

    def add(self, variable: int, change: np.ndarray) -> None:
        """Adds to a whole variable. What another process adds to an element at the same time may be lost.

        Args:
            variable: number of the variable.
            change: array to add, of the variable's shape and dtype.
        """
        array = self.memory.arrays[variable]
        np.add(array, change, out=array)
        self._note(variable, np.array([_WHOLE]))

    def add_rows(self, variable: int, rows: np.ndarray, change: np.ndarray) -> None:
        """Adds to some rows of a variable.

        Args:
            variable: number of the variable.
            rows: indices of the rows, each once.
            change: array to add to these rows.
        """
        self.memory.arrays[variable][rows] += change
        self._note(variable, rows)

    def assign(self, variable: int, value: np.ndarray) -> None:
        """Sets a whole variable.

        Args:
            variable: number of the variable.
            value: new value, of the variable's shape and dtype.
        """
        self.memory.arrays[variable][...] = value
        self._note(variable, np.array([_WHOLE]))

    def assign_rows(self, variable: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Sets some rows of a variable.

        Args:
            variable: number of the variable.
            rows: indices of the rows, each once.
            values: new values of these rows.
        """
        self.memory.arrays[variable][rows] = values
        self._note(variable, rows)

    def count(self) -> None:
        """Counts an update. Its staleness is the number of updates since the last call of `changed_by_others`."""
        staleness = self.memory.updates() - self._updates
        self.memory.counts[self._place, min(max(0, staleness), DELAYS - 1)] += 1

    def changed_by_others(self, variables: Sequence[int]) -> dict[int, np.ndarray | None]:
        """Returns the rows that others have changed since the last call; to be called before values are read.

        Args:
            variables: numbers of the variables to look for.

        Returns:
            For each variable, indices of its rows, which may repeat; None if all rows may have changed.
        """
        self._updates = self.memory.updates()
        changes, is_known = [], True
        for place in np.flatnonzero(self.memory.heads != self._seen):
            if place == self._place:
                continue
            head, seen = int(self.memory.heads[place]), int(self._seen[place])
            is_known = is_known and head - seen <= RING // 2  # older ones may be overwritten during the read
            changes.append(
                self.memory.rings[place][np.arange(seen, head) % RING] if is_known else np.empty(0, np.int64)
            )
            self._seen[place] = head
        if not is_known:
            return dict.fromkeys(variables)
        rows = np.concatenate(changes) if changes else np.empty(0, np.int64)
        return {variable: _rows_of(rows, variable) for variable in variables}

    def _note(self, variable: int, rows: np.ndarray) -> None:
        """Notes changed rows, after their values: a process that reads the note then also reads the change."""
        head, rows = int(self.memory.heads[self._place]), rows[-RING:]
        self.memory.rings[self._place][np.arange(head, head + len(rows)) % RING] = (variable << _ROW_BITS) | rows
        self.memory.heads[self._place] = head + len(rows)


def size_of(shapes: Shapes) -> int:
    """Returns the number of bytes of the memory for variables.

    Args:
        shapes: the shard's variables.
    """
    return _places(shapes)[-1]


def _rows_of(noted: np.ndarray, variable: int) -> np.ndarray | None:
    rows = noted[noted >> _ROW_BITS == variable] & _WHOLE
    return None if (rows == _WHOLE).any() else rows


def _shapes(shapes: Shapes) -> list[tuple[int, ...]]:
    return [(PLACES, DELAYS), (PLACES,), (PLACES, RING), *shapes.shapes]


def _dtypes(shapes: Shapes) -> list[np.dtype]:
    return [np.dtype(np.int64)] * 3 + shapes.dtypes


def _places(shapes: Shapes) -> list[int]:
    """Returns the offset of each array, and of the end of the memory."""
    offsets = [HEAD_BYTES]
    for shape, dtype in zip(_shapes(shapes), _dtypes(shapes), strict=True):
        offsets.append(offsets[-1] + -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
    return offsets
