"""Memory that a server makes, and that workers on its machine map: variables, and what workers note for each other.

Nobody locks anything. Each worker has a *place*, to which it alone writes: how many updates it has made, by their
staleness, and a ring of the rows that it has changed, from which the others learn what to read again.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import numpy as np

from tfdist.parameter_server.protocol import nameless
from tfdist.parameter_server.protocol.gradients import Shapes
from tfdist.parameter_server.protocol.nameless import HEAD_BYTES, Where

PLACES = 64
"""Workers that the memory has room for; the first place is the server's."""
DELAYS = 64
"""Stalenesses that are told apart; higher ones count as the highest."""
RING = 1 << 17
"""Rows that a worker's ring remembers. Who has not looked for longer reads whole variables."""

_ALIGNMENT = 64
_ROW_BITS = 40
_WHOLE = (1 << _ROW_BITS) - 1
"""In place of a row: all rows."""


class Memory:
    """The mapped memory.

    Args:
        mapped: memory that `size_of` tells the size of.
        where: as others find it.
        shapes: of the variables.

    Attributes:
        where, shapes: as given.
        arrays: the variables.
        counts: updates, by place and staleness, int64 of shape ``(PLACES, DELAYS)``.
        heads: by place, the number of rows that were ever written to its ring, int64.
        rings: by place, the last of these rows, int64 of shape ``(PLACES, RING)``.
    """

    def __init__(self, mapped: mmap.mmap, where: Where, shapes: Shapes) -> None:
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
        """Makes memory, full of zeros.

        Args:
            shapes: of the variables.

        Raises:
            OSError: this system has no such files, or no memory is left.
        """
        return cls(*nameless.make(size_of(shapes), is_reserved=False), shapes)

    @classmethod
    def open(cls, where: Where, shapes: Shapes) -> Memory | None:
        """Maps memory that a server has made.

        Args:
            where: as the server says.
            shapes: of the variables.

        Returns:
            None if this process cannot open it; see `tfdist.parameter_server.protocol.nameless.mapped`.
        """
        found = nameless.mapped(where, size_of(shapes))
        return None if found is None else cls(found, where, shapes)

    def updates(self) -> int:
        """How many updates workers have made."""
        return int(self.counts.sum())


class Writer:
    """What one process writes to its place, and reads from the others' since it looked last.

    Args:
        memory: of a server.
        place: this process's own.
    """

    def __init__(self, memory: Memory, place: int) -> None:
        self.memory = memory
        self._place = place
        self._seen = memory.heads.copy()
        self._updates = memory.updates()

    def add(self, variable: int, change: np.ndarray) -> None:
        """Adds to a whole variable. What another process adds to an element at the same time may be lost.

        Args:
            variable: its number.
            change: of its shape and dtype.
        """
        array = self.memory.arrays[variable]
        np.add(array, change, out=array)
        self._note(variable, np.array([_WHOLE]))

    def add_rows(self, variable: int, rows: np.ndarray, change: np.ndarray) -> None:
        """Adds to some rows.

        Args:
            variable: its number.
            rows: their indices, each once.
            change: of them.
        """
        self.memory.arrays[variable][rows] += change
        self._note(variable, rows)

    def assign(self, variable: int, value: np.ndarray) -> None:
        """Sets a whole variable.

        Args:
            variable: its number.
            value: of its shape and dtype.
        """
        self.memory.arrays[variable][...] = value
        self._note(variable, np.array([_WHOLE]))

    def assign_rows(self, variable: int, rows: np.ndarray, values: np.ndarray) -> None:
        """Sets some rows.

        Args:
            variable: its number.
            rows: their indices, each once.
            values: of them.
        """
        self.memory.arrays[variable][rows] = values
        self._note(variable, rows)

    def count(self) -> None:
        """Counts an update of the values that were read before the last `changed_by_others`."""
        staleness = self.memory.updates() - self._updates
        self.memory.counts[self._place, min(max(0, staleness), DELAYS - 1)] += 1

    def changed_by_others(self, variables: Sequence[int]) -> dict[int, np.ndarray | None]:
        """The rows that others have changed since the last call; to be called before values are read.

        Args:
            variables: that somebody asks about.

        Returns:
            For each of them, indices, some of them perhaps several times; None for the whole variable.
        """
        self._updates = self.memory.updates()
        found, is_known = [], True
        for place in np.flatnonzero(self.memory.heads != self._seen):
            if place == self._place:
                continue
            head, seen = int(self.memory.heads[place]), int(self._seen[place])
            is_known = is_known and head - seen <= RING // 2  # the rest may be written over while it is read
            found.append(self.memory.rings[place][np.arange(seen, head) % RING] if is_known else np.empty(0, np.int64))
            self._seen[place] = head
        if not is_known:
            return dict.fromkeys(variables)
        rows = np.concatenate(found) if found else np.empty(0, np.int64)
        return {variable: _rows_of(rows, variable) for variable in variables}

    def _note(self, variable: int, rows: np.ndarray) -> None:
        """After the values: who reads the note reads the change."""
        head, rows = int(self.memory.heads[self._place]), rows[-RING:]
        self.memory.rings[self._place][np.arange(head, head + len(rows)) % RING] = (variable << _ROW_BITS) | rows
        self.memory.heads[self._place] = head + len(rows)


def size_of(shapes: Shapes) -> int:
    """Bytes of the memory for variables.

    Args:
        shapes: of the variables.
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
    """Where each array begins, and where the memory ends."""
    found = [HEAD_BYTES]
    for shape, dtype in zip(_shapes(shapes), _dtypes(shapes), strict=True):
        found.append(found[-1] + -(-prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT)
    return found
