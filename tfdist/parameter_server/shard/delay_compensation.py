"""Gradients that come late, corrected for what the parameters have become since."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.protocol.gradients import Gradients, Shapes, distinct_rows

_EPSILON = 1e-7


class DelayCompensation:
    """Corrects the gradients of a shard, by what it has sent to each worker.

    It keeps the parameters that each worker has read last, one copy a worker; and with a `DelayCompensated.decay` the
    moving means of squared gradients, one more copy.

    Args:
        policy: with the numbers of the correction.
        shapes: of the shard's variables.
    """

    def __init__(self, policy: DelayCompensated, shapes: Shapes) -> None:
        self._policy = policy
        self._shapes = shapes
        self._read: dict[int, dict[int, Sequence[np.ndarray]]] = {}
        self._squares: dict[int, np.ndarray] = {}

    def sent(self, worker: int, version: int, vectors: Sequence[np.ndarray]) -> None:
        """Notes what a worker has been given.

        Args:
            worker: its number.
            version: of the parameters.
            vectors: the parameters, which stay as they are.
        """
        self._read.setdefault(worker, {})[version] = vectors

    def forget(self, worker: int) -> None:
        """Drops what a worker has been given."""
        self._read.pop(worker, None)

    def corrected(self, worker: int, version: int, gradients: Gradients, now: Sequence[np.ndarray]) -> Gradients:
        """A worker's gradients, corrected. They are as they were where it is not known what the worker has read.

        Args:
            worker: its number.
            version: of the parameters that the gradients are of.
            gradients: of the shard's variables.
            now: the parameters as they are, in the layout of all variables.
        """
        kept = self._read.get(worker, {})
        for earlier in [number for number in kept if number < version]:
            del kept[earlier]
        if version not in kept:
            return gradients
        layout, everything = self._shapes.layout(gradients.kinds), self._shapes.layout()
        given = layout.arrays(gradients.vectors)
        arrays: list[np.ndarray | None] = [None] * len(gradients.kinds)
        sparse = {}
        for place, kind in enumerate(gradients.kinds):
            if kind == "none":
                continue
            moved = everything.array(place, now) - everything.array(place, kept[version])
            if kind == "dense":
                arrays[place] = self._of(place, given[place], moved, slice(None))
            else:
                rows, indices = distinct_rows(*gradients.sparse[place])  # the correction is not linear
                sparse[place] = self._of(place, rows, moved[indices], indices), indices
        return Gradients(gradients.kinds, layout.vectors(arrays), sparse)

    def _of(self, place: int, gradient: np.ndarray, moved: np.ndarray, where: slice | np.ndarray) -> np.ndarray:
        """The correction, in float32 at least, of the elements of a variable where the gradient is."""
        exact = gradient.astype(np.promote_types(gradient.dtype, np.float32))
        rate: float | np.ndarray = self._policy.rate
        if self._policy.decay is not None:
            if place not in self._squares:
                self._squares[place] = np.zeros(self._shapes.shapes[place], exact.dtype)
            squares = self._squares[place]
            squares[where] = self._policy.decay * squares[where] + (1 - self._policy.decay) * exact**2
            rate = rate / np.sqrt(squares[where] + _EPSILON)
        return (exact + rate * exact**2 * moved.astype(exact.dtype)).astype(gradient.dtype)
