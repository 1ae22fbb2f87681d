"""Gradients of the weights of a process's stages, summed over micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tfdist.strategies.keras.sparse_gradients import are_of_samples

Gradient: TypeAlias = tf.Tensor | tf.IndexedSlices


class GradientSums:
    """Gradients of variables, summed over micro-batches.

    Sparse gradients are those that the whole batch would have. Rows of samples are concatenated. Rows that are the same
    for all samples, such as those of a position embedding, occur once, with their sum; see
    `tfdist.strategies.keras.sparse_gradients`.
    """

    def __init__(self) -> None:
        self._sums: dict[int, Any] = {}
        self._rows: dict[int, dict[Hashable, list[tf.IndexedSlices]]] = {}

    def add(self, variable: Any, gradient: Gradient | None, part: Hashable = None) -> Gradient | None:
        """Adds a gradient.

        Args:
            variable: a Keras variable.
            gradient: dense or sparse gradient; None adds nothing.
            part: part of the model that the gradient comes from; the same for all micro-batches.

        Returns:
            The sum of the dense gradients so far, or the given sparse gradient. The action ends when it is computed.
        """
        key = id(variable)
        if isinstance(gradient, tf.IndexedSlices):
            self._rows.setdefault(key, {}).setdefault(part, []).append(gradient)
        elif gradient is not None:
            gradient = self._sums[key] = gradient if key not in self._sums else self._sums[key] + gradient
        return gradient

    def wait_for(self, operations: Sequence[Any]) -> None:
        """Makes all gradients also wait for operations of a graph.

        Args:
            operations: operations for control dependencies.
        """
        with tf.control_dependencies(operations):
            self._sums = {key: tf.identity(total) for key, total in self._sums.items()}
            for rows in itertools.chain.from_iterable(parts.values() for parts in self._rows.values()):
                rows[:] = [
                    tf.IndexedSlices(tf.identity(slices.values), slices.indices, slices.dense_shape) for slices in rows
                ]

    def of(self, variable: Any) -> Gradient | None:
        """Returns the gradient of a variable: sparse if all its parts are, None if there is none.

        Args:
            variable: a Keras variable.
        """
        total, parts = self._sums.get(id(variable)), self._rows.get(id(variable), {})
        if not parts:
            return total
        joined = _joined([slices for rows in parts.values() for slices in _of_whole_batch(rows)])
        return joined if total is None else total + tf.convert_to_tensor(joined)


def _of_whole_batch(rows: list[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    """Returns the sparse gradients of one part of a model for the whole batch."""
    if any(are_of_samples(slices) for slices in rows):
        return rows
    return [tf.IndexedSlices(tf.add_n([slices.values for slices in rows]), rows[0].indices, rows[0].dense_shape)]


def _joined(rows: list[tf.IndexedSlices]) -> tf.IndexedSlices:
    if len(rows) == 1:
        return rows[0]
    return tf.IndexedSlices(
        tf.concat([slices.values for slices in rows], 0),
        tf.concat([slices.indices for slices in rows], 0),
        rows[0].dense_shape,
    )
