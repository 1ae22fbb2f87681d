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
        total = tf.reduce_sum(x, axes, keepdims=True)
        count = tf.size(x) // tf.size(total)
        mean = tf.math.divide_no_nan(total, tf.cast(count, x.dtype))
        squares = tf.reduce_sum(tf.math.squared_difference(x, tf.stop_gradient(mean)), axes, keepdims=True)
        mean, variance = _of_all(replica, mean, squares, count)
        return (mean, variance) if keepdims else (tf.squeeze(mean, axes), tf.squeeze(variance, axes))

    return _compute_moments_sync


def _of_masked_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    def _moments(self: Any, inputs: Any, mask: Any) -> Any:
        replica = tf.distribute.get_replica_context()
        synchronizes = self.synchronized and replica is not None and current_strategy.current(DataParallel) is not None
        if mask is None or not synchronizes:
            return original(self, inputs, mask)
        dimensions = inputs.shape.rank
        axes = [axis for axis in range(dimensions) if axis != self.axis % dimensions]
        is_there = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
        count = tf.reduce_sum(tf.cast(is_there, inputs.dtype), axes, keepdims=True)
        mean = tf.math.divide_no_nan(tf.reduce_sum(tf.where(is_there, inputs, 0), axes, keepdims=True), count)
        deviations = tf.where(is_there, inputs - tf.stop_gradient(mean), 0)
        squares = tf.reduce_sum(tf.square(deviations), axes, keepdims=True)
        moments = _of_all(replica, mean, squares, count, keras.config.epsilon())  # as Keras adds it to their number
        return tuple(tf.squeeze(moment, axes) for moment in moments)

    return _moments


def _of_all(
    replica: Any, mean: tf.Tensor, squares: tf.Tensor, count: tf.Tensor, epsilon: float = 0.0
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the mean and the variance of all replicas' samples.

    The variance is a difference of sums, which are in float64: in float32 nothing would be left of it where the mean is
    a thousand times the deviation.

    Args:
        replica: the caller's `tf.distribute.ReplicaContext`.
        mean: the mean of this replica's samples.
        squares: the sum of their squared deviations from it, whose derivative by the mean is zero.
        count: their number; a scalar, or one number for each mean.
        epsilon: is added to the number of all replicas' samples.
    """
    own, own_squares, own_count = (tf.cast(value, tf.float64) for value in (mean, squares, count))
    numbers = tf.broadcast_to(own_count, tf.shape(own))  # of the other parts' shape, so that all are in one collective
    total, of_squares, number = _summed(replica, [numbers * own, own_squares + numbers * tf.square(own), numbers])
    divisor = number + epsilon if epsilon else number
    of_all = tf.math.divide_no_nan(total, divisor)
    rest = tf.square(of_all) * (1 + epsilon / divisor) if epsilon else tf.square(of_all)
    variance = tf.maximum(tf.math.divide_no_nan(of_squares, divisor) - rest, 0.0)
    return tf.cast(of_all, mean.dtype), tf.cast(variance, mean.dtype)


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
