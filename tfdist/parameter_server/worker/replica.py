"""A worker's copy of a server's variables, which is updated by whole variables or by their newer rows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from tfdist.parameter_server.protocol.changes import Edition
from tfdist.parameter_server.protocol.differences import CopyVersion, ParameterDecoder
from tfdist.parameter_server.protocol.gradients import Kind, PushedGradients, Shapes
from tfdist.parameter_server.protocol.messages import WorkerValues


class Replica:
    """The values that a worker has of one server.

    Answers are queued until they are taken, so that a replica holds the values that the worker computes with. Variables
    of which rows are wanted are kept in memory of their own. The others stay in the arrays of the answer.

    Args:
        shapes: the server's variables.
        decoder: decoder of compressed parameters; None if the server does not compress them.
    """

    def __init__(self, shapes: Shapes, decoder: ParameterDecoder | None = None) -> None:
        self._shapes = shapes
        self._decoder = decoder
        self._queue: list[tuple[Edition, PushedGradients]] = []
        self._edition: Edition | None = None
        self._newest = PushedGradients((), [])
        self._kept: dict[int, np.ndarray] = {}

    @property
    def has(self) -> WorkerValues:
        """What the worker has of the server's parameters."""
        generation = 0 if self._decoder is None else self._decoder.generation
        return WorkerValues(self._edition, tuple(sorted(self._kept)), generation)

    def keep(self, places: Collection[int]) -> None:
        """Asks for rows of these variables from now on.

        Args:
            places: indices of the variables.
        """
        if missing := [place for place in places if place not in self._kept]:
            arrays = self._arrays()
            self._kept |= {place: arrays[place].copy() for place in missing}

    def receive(
        self, edition: Edition, kinds: Sequence[Kind], arrays: Sequence[np.ndarray], copy: CopyVersion | None = None
    ) -> None:
        """Queues an answer.

        Args:
            edition: edition of the values.
            kinds: kind of each variable's values, as in `Values`.
            arrays: arrays of the message, which must not change until the answer is taken.
            copy: state of the decoder's copy after the answer; None if the answer is not for it.

        Raises:
            ValueError: the arrays do not fit the variables.
        """
        received = self._decoded(kinds, arrays, copy)
        if unasked := sorted(received.sparse.keys() - self._kept.keys()):
            raise ValueError(f"rows of the variables {unasked}; expected rows of {list(self._kept)} at most")
        self._queue.append((edition, received))

    def take(self, places: Collection[int] = ()) -> list[np.ndarray]:
        """Brings the copy up to date with the queued answers.

        Args:
            places: indices of variables to return by rows; each was passed to `keep` before.

        Returns:
            Vectors of the other variables; then, for each of ``places``, the rows that have changed since the last
            call, and their indices in ascending order.
        """
        changed: dict[int, list[np.ndarray] | None] = {place: [] for place in self._kept}
        for edition, answer in self._queue:
            if self._is_older(edition):
                continue  # it was overtaken: the newer answer before it has all of its rows
            if self._edition is not None or not answer.sparse:
                self._edition = edition
            self._newest = answer
            for place, kept in self._kept.items():
                known = changed[place]
                if place in answer.sparse:
                    rows, indices = answer.sparse[place]
                    kept[indices] = rows
                    if known is not None:
                        known.append(indices)
                else:
                    kept[...] = self._shapes.layout(answer.kinds).array(place, answer.vectors)
                    changed[place] = None
        self._queue.clear()
        newer: list[np.ndarray] = []
        for place in places:
            indices = _together(changed[place], len(self._kept[place]))
            newer += [self._kept[place][indices], indices]
        return [*self._vectors(places), *newer]

    def forget(self) -> None:
        """Asks for whole variables in the next answer."""
        self._edition = None

    def values(self) -> list[np.ndarray]:
        """Returns the variables as they were taken last. They must not be written to."""
        arrays = self._arrays() | self._kept
        return [arrays[place] for place in range(len(self._shapes.shapes))]

    def _decoded(
        self, kinds: Sequence[Kind], arrays: Sequence[np.ndarray], copy: CopyVersion | None
    ) -> PushedGradients:
        if self._decoder is not None:
            if copy is not None:
                return self._decoder.received(kinds, arrays, copy)
            self._decoder.forget()
        return PushedGradients.received(kinds, arrays, self._shapes)

    def _is_older(self, edition: Edition) -> bool:
        return self._edition is not None and edition[0] == self._edition[0] and edition[1] < self._edition[1]

    def _arrays(self) -> dict[int, np.ndarray]:
        return self._shapes.layout(self._newest.kinds).arrays(self._newest.vectors)

    def _vectors(self, places: Collection[int]) -> list[np.ndarray]:
        """Returns vectors of all variables except those at ``places``."""
        everything = range(len(self._shapes.shapes))
        kinds: tuple[Kind, ...] = tuple("sparse" if place in places else "dense" for place in everything)
        if kinds == self._newest.kinds:
            return self._newest.vectors
        return self._shapes.layout(kinds).vectors(self.values())


def _together(changed: list[np.ndarray] | None, rows: int) -> np.ndarray:
    """Returns the indices of rows that have changed; those of all rows if ``changed`` is None."""
    if changed is None:
        return np.arange(rows)
    return changed[0] if len(changed) == 1 else np.unique(np.concatenate([np.empty(0, np.int64), *changed]))
