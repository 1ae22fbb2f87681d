"""Lazy updates: of a variable, the rows alone that a sparse gradient names, also where the optimizer moves others."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.parameter_server.protocol.gradients import distinct_rows
from tfdist.parameter_server.shard.row_optimizer import RowOptimizer
from tfdist.tensors import to_array


class LazyRows:
    """Updates rows of variables and their slots, which stay the optimizer's, as TensorFlow Addons' LazyAdam.

    Gradients of the same row are summed first.

    Args:
        optimizer: as `keras.saving.serialize_keras_object` describes it.

    Raises:
        ValueError: the optimizer cannot update rows apart from each other (`RowOptimizer`).
    """

    def __init__(self, optimizer: dict[str, Any]) -> None:
        self._config = copy.deepcopy(optimizer)  # Keras changes it
        self._made: dict[tuple[int, str, bool], RowOptimizer] = {}
        try:
            self._optimizer(1, np.dtype(np.float32), True)
        except ValueError as error:
            raise ValueError(f'sparse="lazy": {error} Or use sparse="exact".') from None

    def update(
        self,
        variables: Sequence[Any],
        gradient: tuple[np.ndarray, np.ndarray],
        scalars: Mapping[str, Any],
        decays: bool,
    ) -> list[np.ndarray]:
        """Makes one update.

        Args:
            variables: the Keras variable, and its slots in the order in which the optimizer makes them.
            gradient: rows and their indices.
            scalars: the optimizer's scalars, in its order; they stay as they are.
            decays: whether weight decay applies, which acts on the named rows.

        Returns:
            The values of the scalars after the update.
        """
        rows, indices = distinct_rows(*gradient)
        dim = int(np.prod(rows.shape[1:]))
        optimizer = self._optimizer(dim, rows.dtype, decays)
        optimizer.scalars = [np.array(to_array(one.value.read_value())) for one in scalars.values()]
        before = [to_array(tf.gather(variable.value, indices)) for variable in variables]
        shapes = [(dim,), *optimizer.slot_shapes]
        columns = [one.reshape(len(indices), *shape).copy() for one, shape in zip(before, shapes, strict=True)]
        optimizer.update(columns, np.arange(len(indices)), rows.reshape(len(indices), dim))
        for variable, column, one in zip(variables, columns, before, strict=True):
            values = tf.constant(column.reshape(one.shape))
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
