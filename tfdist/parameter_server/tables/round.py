"""One update of a table by several workers together: their gradients wait until all are there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from tfdist.parameter_server.protocol.tables import UpdateRows
from tfdist.parameter_server.shard.shard import Answer


@dataclass(frozen=True)
class Part:
    """What one worker gives to an update.

    Attributes:
        message: of the worker.
        keys: int64 [n].
        gradients: [n, dim].
        answer: to the worker.
    """

    message: UpdateRows
    keys: np.ndarray
    gradients: np.ndarray
    answer: Answer


class Round:
    """The parts of the next update. A worker waits for the answer, so there is one update at a time.

    Args:
        workers: numbers of those that take part.
    """

    def __init__(self, workers: Collection[int]) -> None:
        self._workers = frozenset(workers)
        self._parts: dict[int, Part] = {}

    @property
    def awaited(self) -> tuple[int, ...]:
        """The workers whose parts are missing, in ascending order."""
        return tuple(sorted(self._workers - self._parts.keys()))

    def add(self, part: Part) -> bool:
        """Adds a worker's part; one that comes again replaces the first.

        Returns:
            Whether it came again.
        """
        is_again = part.message.worker in self._parts
        self._parts[part.message.worker] = part
        return is_again

    def forget(self, worker: int) -> None:
        """Drops the part of a worker, if there is one.

        Args:
            worker: its number.
        """
        self._parts.pop(worker, None)

    def take(self) -> list[Part]:
        """All parts, in the order of the workers, so that sums are the same in each run. The next update begins."""
        parts = [self._parts[worker] for worker in sorted(self._parts)]
        self._parts = {}
        return parts
