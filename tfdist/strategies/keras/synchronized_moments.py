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
        mean, variance = tf.nn.moments(x, axes, keepdims=True)
        count = tf.fill(tf.shape(mean), tf.cast(tf.size(x) / tf.size(mean), x.dtype))
        mean, variance = _of_all(replica, mean, variance * count, count)
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
        is_there = tf.cast(mask, tf.bool)[..., tf.newaxis]
        count = tf.reduce_sum(tf.cast(tf.broadcast_to(is_there, tf.shape(inputs)), inputs.dtype), axes)
        mean = tf.math.divide_no_nan(tf.reduce_sum(tf.where(is_there, inputs, 0), axes), count)
        deviations = tf.where(is_there, inputs - mean, 0)
        return _of_all(
            replica, mean, tf.reduce_sum(tf.square(deviations), axes), count, keras.config.epsilon()
        )  # Keras divides by the number and its epsilon

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
        squares: the sum of their squared deviations from it.
        count: their number, in the same shape.
        epsilon: is added to the number of all replicas' samples.
    """
    own, own_squares, own_count = (tf.cast(value, tf.float64) for value in (mean, squares, count))
    parts = [own_count * own, own_squares + own_count * tf.square(own), own_count]
    total, of_squares, number = _summed(replica, parts)
    divisor = number + epsilon
    of_all = tf.math.divide_no_nan(total, divisor)
    deviations = of_squares - 2 * of_all * total + number * tf.square(of_all)
    variance = tf.maximum(tf.math.divide_no_nan(deviations, divisor), 0.0)
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
