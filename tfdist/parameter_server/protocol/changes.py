"""Tracks which rows of a server's variables have changed since a worker read them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence

import numpy as np

Edition = tuple[int, int]
"""Edition of values: a random number that identifies a `Changes` object, and the number of changes noted there."""


class Changes:
    """The edition of a shard's values, and of each row that has changed apart from others.

    A worker sends the edition that it has, and gets the rows that are newer. So the server stores nothing for each
    worker, and lost or repeated messages do no harm. A server that was started again has another random number, so that
    everything that workers have counts as old.

    Args:
        shapes: shapes of the shard's variables.
        itemsizes: bytes per element of each variable.
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
        """Edition of the newest values."""
        return self._number, self._count

    def note(self, whole: Iterable[int], rows: dict[int, np.ndarray]) -> None:
        """Notes a change.

        Args:
            whole: variables of which all rows may have changed.
            rows: by variable, indices of the rows that may have changed; its other rows have not.
        """
        self._count += 1
        for place in whole:
            self._whole[place] = self._count
        for place, indices in rows.items():
            if place not in self._rows:
                self._rows[place] = np.zeros(self._shapes[place][0], np.int64)
            self._rows[place][indices] = self._count

    def since(self, edition: Edition) -> dict[int, np.ndarray]:
        """Returns the rows that a worker lacks.

        Args:
            edition: edition that the worker has.

        Returns:
            By variable, the indices of these rows, in ascending order. A variable that is missing has to be sent whole:
            its changes are not known by rows, or these rows take more than half as many bytes as the variable.
        """
        number, count = edition
        if number != self._number or not 0 <= count <= self._count:
            return {}
        newer_rows = {}
        for place, rows in self._rows.items():
            if self._whole[place] > count:
                continue
            newer = np.flatnonzero(rows > count)
            nbytes = self._row_bytes[place]
            if 2 * len(newer) * (nbytes + newer.itemsize) <= len(rows) * nbytes:
                newer_rows[place] = newer
        return newer_rows
