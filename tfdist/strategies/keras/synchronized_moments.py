"""Moments over all replicas for `keras.layers.BatchNormalization(synchronized=True)`, with one collective each way.

Keras would sum the samples, their squares and their number in three collectives, and nothing where there is a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.keras import tf_nn
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras.collective_gradients import received, sent


def install() -> None:
    """Installs the seams."""
    replace(tf_nn, "_compute_moments_sync", _in_one_sum)
    replace(keras.layers.BatchNormalization, "_moments", _of_masked_rows)


def _in_one_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    def _compute_moments_sync(x: Any, axes: Any, keepdims: bool) -> Any:
        replica = tf.distribute.get_replica_context()
        if replica is None or current_strategy.current(DataParallel) is None:
            return original(x, axes, keepdims)
        parts = [tf.reduce_sum(value, axes, keepdims=True) for value in (x, tf.square(x), tf.ones_like(x))]
        total, squares, count = _summed(replica, parts)
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.maximum(tf.math.divide_no_nan(squares, count) - tf.square(mean), 0.0)
        return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    return _compute_moments_sync


def _of_masked_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        replica = tf.distribute.get_replica_context()
        synchronizes = self.synchronized and replica is not None and current_strategy.current(DataParallel) is not None
        if mask is None or not synchronizes:
            return original(self, inputs, mask)
        counts = tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., tf.newaxis], tf.shape(inputs))
        x = tf.where(counts > 0, inputs, 0)
        total, squares, count = _summed(
            replica, [tf.reduce_sum(value, self._reduction_axes) for value in (x, tf.square(x), counts)]
        )
        divisor = count + keras.config.epsilon()  # as in Keras
        mean = total / divisor
        variance = (squares - 2 * mean * total + count * tf.square(mean)) / divisor
        return mean, tf.maximum(variance, 0.0)

    return _moments


def _summed(replica: Any, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns sums over all replicas; sums of gradients on the way back have the same options, which TensorFlow drops.

    Args:
        replica: the caller's `tf.distribute.ReplicaContext`.
        parts: tensors whose static shapes are the same on all replicas, as their layers are.
    """

    @tf.custom_gradient
    def sums(*given: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[tf.Tensor]]]:
        totals = replica.all_reduce(tf.distribute.ReduceOp.SUM, list(given), private.StaticOptions())
        return totals, lambda *gradients: _summed(replica, gradients)

    return received(sums(*sent(list(parts))))
