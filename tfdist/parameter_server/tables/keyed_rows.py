"""Columns of rows that are found by their keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfdist.parameter_server.tables.key_index import KeyIndex, grown

_LEAST_ROWS = 16


class KeyedRows:
    """Rows of several columns, stored in the slots of a `KeyIndex`.

    Memory is reserved by doubling; the operating system provides it when it is first written. While the columns grow,
    one column after the other is held twice.

    Args:
        columns: shape of one element and dtype of each column, by name.
    """

    def __init__(self, columns: Mapping[str, tuple[tuple[int, ...], Any]]) -> None:
        self._index = KeyIndex()
        self._columns = {
            name: np.empty((_LEAST_ROWS, *shape), np.dtype(dtype)) for name, (shape, dtype) in columns.items()
        }

    def __len__(self) -> int:
        return self._index.size

    def __getitem__(self, column: str) -> np.ndarray:
        """Returns a column, to read and write in place. Adding and removing rows makes it invalid."""
        return self._columns[column][: len(self)]

    @property
    def keys(self) -> np.ndarray:
        """The keys by slot, int64 [rows]; not to be written."""
        return self._index.keys[: len(self)]

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the slots of int64 keys, as int64; −1 for keys without a row."""
        return self._index.find(keys)

    def add(self, keys: np.ndarray, values: Mapping[str, Any]) -> np.ndarray:
        """Adds rows for new keys.

        Args:
            keys: keys, int64 [n], distinct, and without a row yet.
            values: values of every column, by name: an array [n, …], or one value for all rows.

        Returns:
            The slots of the rows, int64 [n].
        """
        slots = self._index.add(keys)
        for name, column in self._columns.items():
            if len(self) > len(column):
                self._columns[name] = column = grown(column, len(self))
            column[len(self) - len(keys) : len(self)] = values[name]
        return slots

    def remove(self, slots: np.ndarray) -> None:
        """Removes rows. Rows with the highest slots move to the free slots.

        Args:
            slots: distinct slots of the rows.
        """
        holes, movers = self._index.remove(slots)
        for column in self._columns.values():
            column[holes] = column[movers]
