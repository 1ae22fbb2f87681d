"""Losses under `fit`: corrected so that the mean over shares, weighted by samples, is the loss of the whole batch.

Gradients are reduced as the mean over replicas, weighted by samples (`tfdist.strategies.keras_optimizers`). A loss
that is a mean over samples, as most are, needs no correction. Other losses are corrected where Keras computes them:

| loss | correction |
|---|---|
| a sum over samples | times N/n: all samples divided by the share's |
| a vector of losses, whose sum Keras differentiates | the same |
| a mean weighted by sample weights | times (w/W)·(N/n): the share's weights divided by all weights |
| a mean over the valid steps of a mask | times (v/V)·(N/n): the share's valid steps divided by all valid steps |
| `tf.nn.compute_average_loss`, made for sums | times N/n |
| `tf.nn.scale_regularization_loss`, made for sums | undone |

A loss that is not a mean over samples, such as the square root of one or a Dice coefficient over the batch, becomes the
mean of the shares' values. Outside `fit`, `evaluate` and similar methods, Keras's and TensorFlow's own rules apply:
sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies import at_work
from tfdist.strategies.abilities import SharesBatches
from tfdist.strategies.keras_private import losses


def install(replace: Callable[..., None]) -> None:
    """Installs the seams for losses.

    Args:
        replace: replaces one function by another.
    """
    replace(losses, "scale_loss_for_distribution", _left_alone)
    replace(losses, "unscale_loss_for_distribution", _left_alone)
    replace(losses, "reduce_values", _of_the_whole_batch)
    replace(losses, "apply_mask", _over_valid_steps_of_all)
    for optimizer in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        replace(optimizer, "scale_loss", _vectors_as_sums)
    replace(keras.metrics.Mean, "update_state", _numbers_of_a_batch)
    replace(tf.nn, "compute_average_loss", _as_part_of_sum)
    replace(tf.nn, "scale_regularization_loss", _whole)


def scale_summed_loss(loss: Any) -> tf.Tensor:
    """Marks a loss in a custom `train_step` as a sum over samples, or a sum divided by the global batch's size.

    Under `fit` gradients are averaged over replicas, weighted by samples. This function multiplies the share's part of
    a sum by N/n, the samples of all replicas divided by those of this one, so that the mean is the sum over all
    samples. Elsewhere it does nothing. `tf.nn.compute_average_loss` and Keras losses with ``reduction="sum"`` need no
    call.

    Args:
        loss: the loss of this replica's share; any shape, of a floating dtype.

    Returns:
        A tensor like ``loss``.
    """
    loss = tf.convert_to_tensor(loss)
    extended = at_work.weighing()
    return loss if extended is None else _times(loss, extended.shares.inverse_weight())


def _times(value: Any, factor: tf.Tensor) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return value * tf.cast(factor, value.dtype)


def _left_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(value: Any) -> Any:
        return original(value) if at_work.weighing() is None else value

    return scale


def _of_the_whole_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        loss = original(values, sample_weight, reduction)
        extended = at_work.weighing()
        if extended is None or values.shape.rank == 0:
            return loss
        if reduction == "sum":
            return _times(loss, extended.shares.inverse_weight())
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            return _times(loss, _part_of_all(extended, tf.reduce_sum(sample_weight)))
        return loss

    return reduce_values


def _over_valid_steps_of_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weight = original(sample_weight, mask, dtype=dtype, reduction=reduction)
        extended = at_work.weighing()
        if extended is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weight
        valid = tf.reduce_sum(tf.cast(mask, tf.float64))
        return _times(weight, _part_of_all(extended, valid))

    return apply_mask


def _part_of_all(extended: SharesBatches, divisor: tf.Tensor) -> tf.Tensor:
    """The factor that replaces the share's own divisor by the sum of all replicas' divisors, times N/n."""
    replica = tf.distribute.get_replica_context()
    own = tf.cast(divisor, tf.float64)
    total = replica.all_reduce(tf.distribute.ReduceOp.SUM, own)
    return tf.math.divide_no_nan(own, total) * extended.shares.inverse_weight()


def _vectors_as_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    """Treats a vector of losses as a sum, because Keras differentiates its sum."""

    def scale_loss(self: Any, loss: Any) -> Any:
        loss = original(self, loss)
        extended = at_work.weighing()
        if extended is None or tf.convert_to_tensor(loss).shape.rank == 0:
            return loss
        return _times(loss, extended.shares.inverse_weight())

    return scale_loss


def _as_part_of_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_average_loss(*args: Any, **kwargs: Any) -> tf.Tensor:
        return scale_summed_loss(original(*args, **kwargs))

    return compute_average_loss


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_regularization_loss(regularization_loss: Any) -> tf.Tensor:
        if at_work.weighing() is None:
            return original(regularization_loss)
        return tf.reduce_sum(regularization_loss)

    return scale_regularization_loss


# Reported losses.


def _numbers_of_a_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Weights a scalar that a step passes to a `Mean` without a weight by the share's samples."""

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> None:
        extended = at_work.sharing()
        if extended is not None and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            sample_weight = extended.shares.weight()
        return original(self, values, sample_weight)

    return update_state
