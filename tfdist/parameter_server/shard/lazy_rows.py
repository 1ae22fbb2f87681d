"""Lazy updates: a sparse gradient updates only the rows that it names, even if the optimizer would move others too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.parameter_server.protocol.gradients import distinct_rows
from tfdist.parameter_server.shard.row_optimizer import RowOptimizer
from tfdist.tensors import to_array


class LazyRows:
    """An optimizer that updates only some rows of variables and of their slots, like LazyAdam of TensorFlow Addons.

    Gradients of the same row are summed first.

    Args:
        optimizer: the optimizer, serialized by `keras.saving.serialize_keras_object`.

    Raises:
        ValueError: the optimizer cannot update rows independently of each other (`RowOptimizer`).
    """

    def __init__(self, optimizer: dict[str, Any]) -> None:
        self._config = optimizer
        self._made: dict[tuple[int, str, bool], RowOptimizer] = {}
        try:
            self._optimizer(1, np.dtype(np.float32), True)
        except ValueError as error:
            raise ValueError(
                f'sparse="lazy" cannot be used with this optimizer (use sparse="exact"): {error}'
            ) from None

    def update(
        self,
        variables: Sequence[Any],
        gradient: tuple[np.ndarray, np.ndarray],
        scalars: Mapping[str, Any],
        decays: bool,
    ) -> list[np.ndarray]:
        """Makes one update of the named rows.

        Args:
            variables: the Keras variable, and its slots in the order in which the optimizer makes them.
            gradient: rows and their indices.
            scalars: the optimizer's scalar variables, in its order; this function does not change them.
            decays: whether weight decay applies to the named rows.

        Returns:
            The values of the scalars after the update.
        """
        rows, indices = distinct_rows(*gradient)
        dim = int(np.prod(rows.shape[1:]))
        optimizer = self._optimizer(dim, rows.dtype, decays)
        optimizer.scalars = [np.array(to_array(scalar.value.read_value())) for scalar in scalars.values()]
        before = [to_array(tf.gather(variable.value, indices)) for variable in variables]
        shapes = [(dim,), *optimizer.slot_shapes]
        columns = [old.reshape(len(indices), *shape).copy() for old, shape in zip(before, shapes, strict=True)]
        optimizer.update(columns, np.arange(len(indices)), rows.reshape(len(indices), dim))
        for variable, column, old in zip(variables, columns, before, strict=True):
            values = tf.constant(column.reshape(old.shape))
            variable.value.scatter_update(tf.IndexedSlices(values, tf.constant(indices)))
        return optimizer.scalars

    def _optimizer(self, dim: int, dtype: np.dtype, decays: bool) -> RowOptimizer:
        key = dim, dtype.name, decays
        if key not in self._made:
            config = self._config if decays else _undecayed(self._config)
            self._made[key] = RowOptimizer(config, dim, dtype)
        return self._made[key]


def _undecayed(config: dict[str, Any]) -> dict[str, Any]:
    if not config["config"].get("weight_decay"):
        return config
    return {**config, "config": {**config["config"], "weight_decay": 0.0}}
