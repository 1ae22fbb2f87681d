"""Between a Keras optimizer and the parameter servers: gradients go out of the graph, and new values come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.messages import Gradient
from tfdist.parameter_server.session import Session
from tfdist.tensors import to_array, to_tensor


class Link:
    """One optimizer's variables on the servers. Made eagerly, when its first update is traced.

    Args:
        session: of these variables, not begun.
        optimizer: the Keras optimizer; its slots stay as they are here.
        variables: Keras variables, which get the servers' values.
        is_chief: whether this worker gives the first values and the learning rate.
    """

    def __init__(self, session: Session, optimizer: Any, variables: Sequence[Any], is_chief: bool) -> None:
        self._session = session
        self._optimizer = optimizer
        self._variables = list(variables)
        self._is_chief = is_chief
        self._rate: float | None = None
        values, described = None, None
        if is_chief:
            values = [to_array(variable.value.read_value()) for variable in variables]
            described = keras.optimizers.serialize(optimizer)
        for variable, value in zip(self._variables, session.begin(values, described), strict=True):
            variable.assign(value)

    def update(self, gradients: Sequence[Any]) -> None:
        """Sends gradients and assigns the new values; in the graph under construction, or eagerly.

        Args:
            gradients: tensors, `tf.IndexedSlices` or None, for the variables.
        """
        given: list[tf.Tensor] = []
        kinds = []
        for gradient in gradients:
            if isinstance(gradient, tf.IndexedSlices):
                given += [gradient.values, gradient.indices]
                kinds.append(2)
            else:
                given += [] if gradient is None else [tf.convert_to_tensor(gradient)]
                kinds.append(int(gradient is not None))
        rate = self._optimizer._learning_rate
        sends_rate = self._is_chief and isinstance(rate, keras.Variable)
        rate = tf.convert_to_tensor(rate.value) if sends_rate else tf.constant(0.0)

        def on_host(rate: tf.Tensor, *tensors: tf.Tensor) -> list[tf.Tensor]:
            if sends_rate:
                self._send_rate(float(rate))
            values = self._session.step(_unflattened(kinds, [to_array(tensor) for tensor in tensors]))
            return [tf.constant(self._session.version, tf.int64), *map(to_tensor, values)]

        dtypes = [tf.int64, *(tf.as_dtype(variable.dtype) for variable in self._variables)]
        version, *values = tf.py_function(on_host, [rate, *given], dtypes, name="tfdist_servers")
        for variable, value in zip(self._variables, values, strict=True):
            value.set_shape(variable.shape)
            variable.assign(value)
        version.set_shape(())
        self._optimizer.iterations.assign(tf.cast(version, self._optimizer.iterations.dtype))

    def _send_rate(self, rate: float) -> None:
        if self._rate not in (None, rate):
            self._session.set_learning_rate(rate)
        self._rate = rate

    def close(self) -> None:
        """Leaves the servers."""
        self._session.close()


def _unflattened(kinds: Sequence[int], arrays: Sequence[np.ndarray]) -> list[Gradient]:
    """The gradients, from as many arrays as each has."""
    left = iter(arrays)
    found: list[Gradient] = []
    for count in kinds:
        parts = [next(left) for _ in range(count)]
        found.append(None if not parts else parts[0] if count == 1 else (parts[0], parts[1]))
    return found
