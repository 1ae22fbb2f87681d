"""Losses under `fit`: corrected so that the mean over shares, weighted by samples, is the loss of the whole batch.

Gradients are reduced as the mean over replicas, weighted by samples (`tfdist.strategies.keras.keras_optimizers`). A
loss that is a mean over samples, as most are, needs no correction. Others are corrected where Keras computes them:

| loss | correction |
|---|---|
| a sum over samples | times N/n: all samples divided by the share's |
| a loss for each sample, whose sum a tape differentiates | the same |
| a mean weighted by sample weights | times (w/W)·(N/n): w/W is the share's weights divided by all weights |
| a mean over the valid steps of a mask | times (v/V)·(N/n): v/V is the share's valid steps divided by all |
| `tf.nn.compute_average_loss`, made for sums | times N/n |
| `tf.nn.scale_regularization_loss`, made for sums | undone |

Where processes take steps on their own and average their weights, sums are also multiplied by the number of processes.

Likewise, losses are corrected where a replica computes them for parts of its share, one after another
(`micro_batch_losses`).

A loss that is not a mean over samples, such as the square root of one or a Dice coefficient over the batch, becomes the
mean of the shares' values. Outside `fit`, `evaluate` and similar methods, the rules of Keras and TensorFlow apply:
replicas' losses are summed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import tensorflow as private
from tfdist.private.keras import losses, tree
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras.state_of_steps import state_of_step
from tfdist.thread_values import ThreadValue


def install() -> None:
    """Installs the seams for losses."""
    replace(losses, "scale_loss_for_distribution", _left_alone)
    replace(losses, "unscale_loss_for_distribution", _left_alone)
    replace(losses, "reduce_values", _of_the_whole_batch)
    replace(losses, "apply_mask", _over_valid_steps_of_all)
    replace(tf.GradientTape, "gradient", _of_sums)
    replace(keras.metrics.Mean, "update_state", _numbers_of_a_batch)
    replace(private.ReplicaContext, "merge_call", _beside_others)
    replace(tf.nn, "compute_average_loss", _as_part_of_sum)
    replace(tf.nn, "scale_regularization_loss", _whole)


def scale_summed_loss(loss: Any) -> tf.Tensor:
    """Marks a loss in a custom `train_step` as a sum over samples, or a sum divided by the global batch's size.

    Under `fit` gradients are averaged over replicas, weighted by samples. This function multiplies the share's part of
    a sum by N/n, the samples of all replicas divided by those of this one, so that the mean is the sum over all
    samples. Elsewhere it does nothing. `tf.nn.compute_average_loss`, Keras losses with ``reduction="sum"``, and a
    vector of the samples' losses that is given to `tf.GradientTape.gradient` need no call.

    Args:
        loss: the loss of this replica's share; any shape, of a floating dtype.

    Returns:
        A tensor like ``loss``.
    """
    loss = tf.convert_to_tensor(loss)
    part, extended = _part(), current_strategy.sharing()
    if extended is not None and loss.shape.rank:
        extended.shares.has_marked = True
    return loss if part is None else _times(loss, part.weight_of_sums())


class _Share:
    """Factors for the losses of a replica's share of a batch.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: DataParallel) -> None:
        self._extended = extended

    def inverse_weight(self) -> tf.Tensor:
        """Returns N/n: the number of all samples divided by that of the part."""
        return self._extended.shares.inverse_weight()

    def weight_of_sums(self) -> tf.Tensor:
        """Returns the factor of a sum over the part: N/n, times the number of processes if they average weights."""
        return self.inverse_weight() * self._extended.averaging_processes

    def divisor_correction(self, divisor: tf.Tensor) -> tf.Tensor:
        """Returns the factor that replaces the part's own divisor by that of the whole batch, times N/n."""
        local_divisor = tf.cast(divisor, tf.float64)
        replica = tf.distribute.get_replica_context()
        total = replica.all_reduce(tf.distribute.ReduceOp.SUM, local_divisor, private.OwnOptions())
        return tf.math.divide_no_nan(local_divisor, total) * self.inverse_weight()


class _PartOfShare:
    """Factors for the losses of one part of a replica's share, such as a micro-batch.

    Args:
        divisors: divisors of the whole batch, in the order in which losses need them.
        weight: the part's samples divided by those of the replica, a float64 scalar.
        share: factors of the replica's share; None if the replica has the whole batch.
    """

    def __init__(self, divisors: Sequence[tf.Tensor], weight: tf.Tensor, share: _Share | None) -> None:
        self._divisors = iter(divisors)
        self._inverse = tf.math.reciprocal_no_nan(weight)
        self._share = share

    def inverse_weight(self) -> tf.Tensor:
        """Returns the number of all samples divided by that of the part."""
        return self._inverse if self._share is None else self._inverse * self._share.inverse_weight()

    def weight_of_sums(self) -> tf.Tensor:
        """Returns the factor of a sum over the part."""
        return self._inverse if self._share is None else self._inverse * self._share.weight_of_sums()

    def divisor_correction(self, divisor: tf.Tensor) -> tf.Tensor:
        """Returns the factor that replaces the part's own divisor by the next of the whole batch's divisors.

        Raises:
            ValueError: the part's losses need more divisors than those of the whole batch.
        """
        of_batch = next(self._divisors, None)
        if of_batch is None:
            raise ValueError(
                "the losses of a micro-batch divide by sums of weights or masks more often than those of the whole "
                "batch: give each loss and metric masks and sample weights in all parts of a batch, or in no part"
            )
        return tf.math.divide_no_nan(tf.cast(divisor, tf.float64), of_batch) * self.inverse_weight()


class _DivisorRecorder:
    """A recorder of the divisors of losses, with factors of 1.

    Attributes:
        divisors: divisors, float64 scalars, in the order in which losses need them.
    """

    def __init__(self) -> None:
        self.divisors: list[tf.Tensor] = []

    def inverse_weight(self) -> tf.Tensor:
        """Returns 1, because the loss is not that of a part."""
        return tf.ones([], tf.float64)

    def weight_of_sums(self) -> tf.Tensor:
        """Returns 1, because the loss is not that of a part."""
        return self.inverse_weight()

    def divisor_correction(self, divisor: tf.Tensor) -> tf.Tensor:
        """Records the divisor, and returns 1."""
        self.divisors.append(tf.cast(divisor, tf.float64))
        return self.inverse_weight()


_computed_part: ThreadValue[_PartOfShare | _DivisorRecorder | None] = ThreadValue(None)
"""The part of a batch that a thread computes losses of; None for a replica's share or a whole batch."""


def _part() -> _Share | _PartOfShare | _DivisorRecorder | None:
    """Returns the factors for the losses that are being computed; None for those of a whole batch."""
    if _computed_part.value is not None:
        return _computed_part.value
    extended = current_strategy.sharing()
    return None if extended is None else _Share(extended)


@contextlib.contextmanager
def noting_divisors() -> Iterator[list[tf.Tensor]]:
    """Context in which losses record their divisors; yields the list.

    Divisors are numbers of valid steps and sums of sample weights, float64 scalars.
    """
    noting = _DivisorRecorder()
    with _computed_part.set_to(noting):
        yield noting.divisors


def micro_batch_losses(divisors: Sequence[tf.Tensor], weight: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Context for the losses of one part of a replica's batch: the mean over parts is the loss of the whole batch.

    Args:
        divisors: divisors of the batch of all replicas, as `noting_divisors` yields them.
        weight: the part's samples divided by those of the replica's batch, a float64 scalar.
    """
    extended = current_strategy.sharing()
    share = None if extended is None else _Share(extended)
    return _computed_part.set_to(_PartOfShare(divisors, weight, share))


def _times(value: Any, factor: tf.Tensor) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return value * tf.cast(factor, value.dtype)


def _left_alone(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale(value: Any) -> Any:
        return original(value) if _part() is None else value

    return scale


def _of_the_whole_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_values(values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size") -> Any:
        loss = original(values, sample_weight, reduction)
        part = _part()
        if part is None or values.shape.rank == 0:
            return loss
        if reduction == "sum":
            return _times(loss, part.weight_of_sums())
        if reduction == "mean_with_sample_weight" and sample_weight is not None:
            return _times(loss, part.divisor_correction(tf.reduce_sum(sample_weight)))
        return loss

    return reduce_values


def _over_valid_steps_of_all(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply_mask(sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
        weight = original(sample_weight, mask, dtype=dtype, reduction=reduction)
        part = _part()
        if part is None or mask is None or reduction not in ("mean", "sum_over_batch_size"):
            return weight
        valid = tf.reduce_sum(tf.cast(mask, tf.float64))
        return _times(weight, part.divisor_correction(valid))

    return apply_mask


def _of_sums(original: Callable[..., Any]) -> Callable[..., Any]:
    """Takes gradients of weights from losses of single samples as those of a sum, because a tape adds them up."""

    def gradient(self: Any, target: Any, sources: Any, output_gradients: Any = None, *args: Any, **kwargs: Any) -> Any:
        part = _part()
        if part is not None and output_gradients is None and _has_samples(target) and _are_variables(sources):
            output_gradients = _times(tf.ones_like(target), part.weight_of_sums())
        return original(self, target, sources, output_gradients, *args, **kwargs)

    return gradient


def _has_samples(target: Any) -> bool:
    """Returns whether a tensor has a row for each of the calling replica's samples, in a step that has marked none."""
    extended = current_strategy.sharing()
    if extended is None or extended.shares.has_marked or not isinstance(target, tf.Tensor) or not target.shape.rank:
        return False
    rows = target.shape[0]
    if tf.is_symbolic_tensor(target):
        return rows is None or rows == extended.shares.static
    return bool(rows == max(int(extended.shares.rows()), 1))


def _are_variables(sources: Any) -> bool:
    flat = tree.flatten(sources)
    return bool(flat) and all(isinstance(source, (tf.Variable, keras.Variable)) for source in flat)


def _as_part_of_sum(original: Callable[..., Any]) -> Callable[..., Any]:
    def compute_average_loss(*args: Any, **kwargs: Any) -> tf.Tensor:
        return scale_summed_loss(original(*args, **kwargs))

    return compute_average_loss


def _whole(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_regularization_loss(regularization_loss: Any) -> tf.Tensor:
        if _part() is None:
            return original(regularization_loss)
        return tf.reduce_sum(regularization_loss)

    return scale_regularization_loss


def _beside_others(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps the losses of layers while a replica waits for those of other devices, which call the same model."""

    def merge_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = state_of_step()
        with contextlib.nullcontext() if state is None else state.others_called():
            return original(self, *args, **kwargs)

    return merge_call


# Reported losses.


def _numbers_of_a_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Weights a scalar that a step passes to a `Mean` without a weight by the share's samples.

    Where processes take steps on their own, the samples of other processes' steps are not known: each sample then
    counts alike, not each batch.
    """

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> None:
        extended = current_strategy.sharing()
        if extended is not None and sample_weight is None and tf.convert_to_tensor(values).shape.rank == 0:
            shares = extended.shares
            sample_weight = shares.weight() if extended.synchronizes_steps else tf.cast(shares.rows(), tf.float64)
        return original(self, values, sample_weight)

    return update_state
