"""Which rows of a server's variables have changed since a worker read them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import numpy as np

Edition = tuple[int, int]
"""Of values: a random number of their `Changes`, and how many changes they contain."""


class Changes:
    """The edition of a shard's values, and of each row that has changed apart from others.

    A worker says which edition it has, and gets the rows that are newer. So the server keeps nothing about workers, and
    lost and repeated messages do no harm. A server that was started again has another random number, with which all
    that workers have is old.

    Args:
        shapes: of the variables.
        itemsizes: bytes of an element of each.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], itemsizes: Sequence[int]) -> None:
        self._shapes = list(shapes)
        self._row_bytes = [
            int(np.prod(shape[1:])) * size if shape else size for shape, size in zip(shapes, itemsizes, strict=True)
        ]
        self._number = secrets.randbits(63)
        self._count = 0
        self._whole = [0] * len(shapes)
        self._rows: dict[int, np.ndarray] = {}

    @property
    def edition(self) -> Edition:
        """Of the newest values."""
        return self._number, self._count

    def note(self, whole: Iterable[int], rows: dict[int, np.ndarray]) -> None:
        """Notes a change.

        Args:
            whole: the variables of which all rows may have changed.
            rows: by variable, indices of the rows that may have changed; all others have not.
        """
        self._count += 1
        for place in whole:
            self._whole[place] = self._count
        for place, indices in rows.items():
            if place not in self._rows:
                self._rows[place] = np.zeros(self._shapes[place][0], np.int64)
            self._rows[place][indices] = self._count

    def since(self, edition: Edition) -> dict[int, np.ndarray]:
        """The rows that a worker lacks.

        Args:
            edition: that it has.

        Returns:
            By variable, the indices of these rows, in ascending order. Variables are missing that have to be sent
            whole, since all of their rows may have changed, or so many that whole is as short.
        """
        number, count = edition
        if number != self._number or not 0 <= count <= self._count:
            return {}
        found = {}
        for place, rows in self._rows.items():
            if self._whole[place] > count:
                continue
            newer = np.flatnonzero(rows > count)
            nbytes = self._row_bytes[place]
            if 2 * len(newer) * (nbytes + newer.itemsize) <= len(rows) * nbytes:
                found[place] = newer
        return found
