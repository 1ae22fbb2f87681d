"""A worker's copy of a server's variables, which whole variables or their newer rows bring up to date."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tfdist.parameter_server.protocol.changes import Edition
from tfdist.parameter_server.protocol.gradients import Gradients, Kind, Shapes


class Replica:
    """The values that a worker has of one server.

    What comes is queued until it is taken, so that what this holds is what the worker computes with. Variables of which
    rows are wanted are kept here, in memory of their own; the arrays of others stay those that came.

    Args:
        shapes: of the server's variables.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._queue: list[tuple[Edition, Gradients]] = []
        self._edition: Edition | None = None
        self._newest = Gradients((), [])
        self._kept: dict[int, np.ndarray] = {}

    @property
    def edition(self) -> Edition | None:
        """Of the values; None if the next ones have to be whole."""
        return self._edition

    @property
    def kept(self) -> tuple[int, ...]:
        """The variables of which rows are wanted."""
        return tuple(sorted(self._kept))

    def keep(self, places: Collection[int]) -> None:
        """From now on rows of these variables are wanted.

        Args:
            places: of the variables.
        """
        if missing := [place for place in places if place not in self._kept]:
            arrays = self._arrays()
            self._kept |= {place: arrays[place].copy() for place in missing}

    def receive(self, edition: Edition, kinds: Sequence[Kind], arrays: Sequence[np.ndarray]) -> None:
        """Queues an answer.

        Args:
            edition: of the values.
            kinds: as of `Values`.
            arrays: of the message; they stay as they are until it is taken.

        Raises:
            ValueError: they do not fit the variables.
        """
        received = Gradients.received(kinds, arrays, self._shapes)
        if unasked := sorted(received.sparse.keys() - self._kept.keys()):
            raise ValueError(f"rows of the variables {unasked}; expected rows of {list(self._kept)} at most")
        self._queue.append((edition, received))

    def take(self, places: Collection[int] = ()) -> list[np.ndarray]:
        """Brings the copy up to date.

        Args:
            places: of variables of which rows are wanted; they were kept before.

        Returns:
            Vectors of the other variables, and of each of these the rows that have changed since the last time, and
            their indices, in ascending order.
        """
        changed: dict[int, list[np.ndarray] | None] = {place: [] for place in self._kept}
        for edition, one in self._queue:
            if self._is_older(edition):
                continue  # an answer that was overtaken; what came before it has all of its rows
            if self._edition is not None or not one.sparse:
                self._edition = edition
            self._newest = one
            for place, kept in self._kept.items():
                known = changed[place]
                if place in one.sparse:
                    rows, indices = one.sparse[place]
                    kept[indices] = rows
                    if known is not None:
                        known.append(indices)
                else:
                    kept[...] = self._shapes.layout(one.kinds).array(place, one.vectors)
                    changed[place] = None
        self._queue.clear()
        newer: list[np.ndarray] = []
        for place in places:
            indices = _together(changed[place], len(self._kept[place]))
            newer += [self._kept[place][indices], indices]
        return [*self._vectors(places), *newer]

    def forget(self) -> None:
        """The next answer is to have whole variables."""
        self._edition = None

    def values(self) -> list[np.ndarray]:
        """The variables as they were taken last; they must not be written to."""
        arrays = self._arrays() | self._kept
        return [arrays[place] for place in range(len(self._shapes.shapes))]

    def _is_older(self, edition: Edition) -> bool:
        return self._edition is not None and edition[0] == self._edition[0] and edition[1] < self._edition[1]

    def _arrays(self) -> dict[int, np.ndarray]:
        return self._shapes.layout(self._newest.kinds).arrays(self._newest.vectors)

    def _vectors(self, places: Collection[int]) -> list[np.ndarray]:
        """Vectors of all variables but some."""
        everything = range(len(self._shapes.shapes))
        kinds: tuple[Kind, ...] = tuple("sparse" if place in places else "dense" for place in everything)
        if kinds == self._newest.kinds:
            return self._newest.vectors
        return self._shapes.layout(kinds).vectors(self.values())


def _together(changed: list[np.ndarray] | None, rows: int) -> np.ndarray:
    """The indices of rows that have changed; all without a list."""
    if changed is None:
        return np.arange(rows)
    return changed[0] if len(changed) == 1 else np.unique(np.concatenate([np.empty(0, np.int64), *changed]))
