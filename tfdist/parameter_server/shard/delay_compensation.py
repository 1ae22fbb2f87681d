"""Delay compensation: corrects late gradients for the change of the parameters since the worker read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes, distinct_rows
from tfdist.parameter_server.protocol.packing import VariableSpec
from tfdist.parameter_server.shard.feature import Now, ShardFeature

_EPSILON = 1e-7


class DelayCompensation(ShardFeature):
    """The delay compensation of one shard: corrects late gradients from the parameters that each worker has read.

    It keeps the parameters that each worker has read last, one copy per worker. With `DelayCompensated.decay` it also
    keeps moving means of the squared gradients, one more copy.

    Args:
        policy: rate and decay of the correction.
    """

    def __init__(self, policy: DelayCompensated) -> None:
        self._policy = policy
        self._read: dict[int, dict[int, Sequence[np.ndarray]]] = {}
        self._squares: dict[int, np.ndarray] = {}

    def begin(self, variables: Sequence[VariableSpec], shapes: Shapes) -> None:
        """Takes the shapes of the variables; see `ShardFeature`."""
        self._shapes = shapes

    def sent(self, worker: int, version: int, now: Now) -> None:
        """Records the parameters that were sent to a worker.

        Args:
            worker: number of the worker.
            version: version of the parameters.
            now: function that reads the current parameters.
        """
        self._read.setdefault(worker, {})[version] = now()

    def forget(self, worker: int) -> None:
        """Drops the parameters that were recorded for a worker."""
        self._read.pop(worker, None)

    def corrected(self, worker: int, version: int, gradients: PushedGradients, now: Now) -> PushedGradients:
        """Returns a worker's gradients, corrected if the parameters that it has read are known.

        Args:
            worker: number of the worker.
            version: version of the parameters that the gradients were computed at.
            gradients: gradients of the shard's variables.
            now: function that reads the current parameters.
        """
        kept = self._read.get(worker, {})
        for earlier in [number for number in kept if number < version]:
            del kept[earlier]
        if version not in kept:
            return gradients
        layout, everything = self._shapes.layout(gradients.kinds), self._shapes.layout()
        given, newest = layout.arrays(gradients.vectors), now()
        arrays: list[np.ndarray | None] = [None] * len(gradients.kinds)
        sparse = {}
        for place, kind in enumerate(gradients.kinds):
            if kind == "none":
                continue
            moved = everything.array(place, newest) - everything.array(place, kept[version])
            if kind == "dense":
                arrays[place] = self._of(place, given[place], moved, slice(None))
            else:
                rows, indices = distinct_rows(*gradients.sparse[place])  # summed first: the correction is not linear
                sparse[place] = self._of(place, rows, moved[indices], indices), indices
        return PushedGradients(gradients.kinds, layout.vectors(arrays), sparse)

    def _of(self, place: int, gradient: np.ndarray, moved: np.ndarray, where: slice | np.ndarray) -> np.ndarray:
        """Returns the corrected gradient of some elements of a variable, computed in float32 at least."""
        exact = gradient.astype(np.promote_types(gradient.dtype, np.float32))
        rate: float | np.ndarray = self._policy.rate
        if self._policy.decay is not None:
            if place not in self._squares:
                self._squares[place] = np.zeros(self._shapes.shapes[place], exact.dtype)
            squares = self._squares[place]
            squares[where] = self._policy.decay * squares[where] + (1 - self._policy.decay) * exact**2
            rate = rate / np.sqrt(squares[where] + _EPSILON)
        return (exact + rate * exact**2 * moved.astype(exact.dtype)).astype(gradient.dtype)
