"""One update of a table by several workers together: their gradients wait until all are there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tfdist.parameter_server.protocol.tables import UpdateRows
from tfdist.parameter_server.shard.shard import Answer


@dataclass(frozen=True)
class TableUpdatePart:
    """One worker's part of an update.

    Attributes:
        message: the worker's message.
        keys: keys of the updated rows, int64 [n].
        gradients: gradients of these rows, [n, dim].
        answer: function that sends the answer.
    """

    message: UpdateRows
    keys: np.ndarray
    gradients: np.ndarray
    answer: Answer


class Round:
    """The parts of the next update. Workers wait for the answer, so there is one update at a time.

    Args:
        workers: numbers of the workers that take part.
    """

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        self._parts: dict[int, TableUpdatePart] = {}

    @property
    def awaited(self) -> tuple[int, ...]:
        """The workers whose parts are missing, in ascending order."""
        return tuple(sorted(self._workers - self._parts.keys()))

    def add(self, part: TableUpdatePart) -> bool:
        """Adds a worker's part. A repeated part replaces its earlier copy.

        Returns:
            Whether the worker's part was there already.
        """
        is_again = part.message.worker in self._parts
        self._parts[part.message.worker] = part
        return is_again

    def forget(self, worker: int) -> None:
        """Drops the part of a worker, if there is one.

        Args:
            worker: number of the worker.
        """
        self._parts.pop(worker, None)

    def take(self) -> list[TableUpdatePart]:
        """Removes and returns all parts, in the order of the workers, so that sums are the same in each run."""
        parts = [self._parts[worker] for worker in sorted(self._parts)]
        self._parts = {}
        return parts
