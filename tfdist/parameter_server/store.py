"""The values of a shard, and the Keras optimizer that updates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.messages import Gradient
from tfdist.tensors import to_array


class Store:
    """Variables with their optimizer.

    The optimizer's slots, its iterations, weight decay and averages live here, with one writer.

    Args:
        paths: of the variables, as Keras names them.
        values: their first values.
        optimizer: as `keras.optimizers.serialize` describes it.
    """

    def __init__(self, paths: Sequence[str], values: Sequence[np.ndarray], optimizer: dict[str, Any]) -> None:
        self._optimizer = keras.optimizers.deserialize(optimizer)
        self._variables = [
            keras.Variable(value, dtype=value.dtype.name, name=path.replace("/", "_"))
            for path, value in zip(paths, values, strict=True)
        ]
        self._optimizer.build(self._variables)
        self._apply = tf.function(self._applied, reduce_retracing=True)

    @property
    def iterations(self) -> int:
        """Updates so far."""
        return int(self._optimizer.iterations.numpy())

    def values(self) -> list[np.ndarray]:
        """The parameters; copies, which later updates do not change."""
        return [np.array(to_array(variable.value.value())) for variable in self._variables]

    def set_learning_rate(self, value: float) -> None:
        """Sets the optimizer's learning rate.

        Args:
            value: of the chief.

        Raises:
            TypeError: it is set by a schedule.
        """
        self._optimizer.learning_rate = value

    def update(self, gradients: Sequence[Sequence[Gradient]], weights: Sequence[float]) -> None:
        """Makes one update by a weighted sum of gradients.

        Args:
            gradients: of each push, one for each variable.
            weights: of each push.
        """
        sums = [
            _sum([push[place] for push in gradients], weights, variable.shape)
            for place, variable in enumerate(self._variables)
        ]
        if any(total is not None for total in sums):
            self._apply([total for total in sums if total is not None], [total is not None for total in sums])

    def _applied(self, gradients: list[Any], present: list[bool]) -> None:
        """In a graph for each set of variables that have gradients, and each kind of them."""
        variables = [variable for variable, is_present in zip(self._variables, present, strict=True) if is_present]
        self._optimizer.apply(gradients, variables)


def _sum(gradients: Sequence[Gradient], weights: Sequence[float], shape: tuple[int, ...]) -> Any:
    """The weighted sum for one variable: a tensor, `tf.IndexedSlices`, or None."""
    given = [(one, weight) for one, weight in zip(gradients, weights, strict=True) if one is not None]
    if not given:
        return None
    dense = [(one, weight) for one, weight in given if isinstance(one, np.ndarray)]
    sparse = [(one, weight) for one, weight in given if isinstance(one, tuple)]
    if not dense:
        rows = np.concatenate([_scaled(one[0], weight) for one, weight in sparse])
        indices = np.concatenate([one[1] for one, _ in sparse])
        return tf.IndexedSlices(tf.constant(rows), tf.constant(indices), tf.constant(shape, tf.int64))
    total = np.array(_scaled(*dense[0]))
    for one, weight in dense[1:]:
        total += _scaled(one, weight)
    for (rows, indices), weight in sparse:
        np.add.at(total, indices, _scaled(rows, weight))
    return tf.constant(total)


def _scaled(array: np.ndarray, weight: float) -> np.ndarray:
    return array if weight == 1 else array * array.dtype.type(weight)
