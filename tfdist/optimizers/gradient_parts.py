"""The gradients that an optimizer accumulates, and their deviations from the mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.optimizers import accumulated_by, apply_count, place_of, strategy_of


class GradientParts:
    """Sums the squared deviations of accumulated gradients from their mean, and changes the mean.

    Methods of the optimizer are replaced by ones that also call those of its class. There, gradients are those of this
    process or replica, weighted by samples, but not yet summed.

    Args:
        optimizer: a Keras optimizer that accumulates gradients; its methods are replaced.
        sums: returns the variable for a weight's sum of squared deviations; a scalar variable sums over all elements.
        changed: takes mean gradients, their variables and the sums of squared deviations, and returns new gradients.
    """

    def __init__(
        self,
        optimizer: Any,
        sums: Callable[[Any], Any],
        changed: Callable[[list[Any], Sequence[Any], list[tf.Tensor]], list[Any]],
    ) -> None:
        self._optimizer = optimizer
        self._sums = sums
        self._changed = changed
        self._variables: Sequence[Any] = ()
        optimizer._backend_apply_gradients = self._given
        optimizer._backend_increment_gradient_accumulators = self._accumulated
        optimizer._clip_gradients = self._before_the_sum

    def _given(self, grads: Any, trainable_variables: Any) -> Any:
        self._variables = tuple(trainable_variables)
        return type(self._optimizer)._backend_apply_gradients(self._optimizer, grads, trainable_variables)

    def _accumulated(self, grads: Any, acc_grads: Any) -> Any:
        parts = [tf.convert_to_tensor(gradient) for gradient in grads]
        # In the cross-replica context each replica's own value is assigned.
        tf.__internal__.distribute.interim.maybe_merge_call(
            _assign_all,
            strategy_of(self._optimizer),
            [self._sums(variable).value for variable in self._variables],
            self._counted(parts),
        )
        return type(self._optimizer)._backend_increment_gradient_accumulators(self._optimizer, grads, acc_grads)

    def _before_the_sum(self, grads: Any) -> Any:
        means = [tf.convert_to_tensor(gradient) for gradient in grads]
        steps = self._optimizer.gradient_accumulation_steps
        last = [steps * gradient - before for gradient, before in zip(means, self._before(), strict=True)]
        changed = self._changed(means, self._variables, self._counted(last))
        return type(self._optimizer)._clip_gradients(self._optimizer, changed)

    def _before(self) -> list[tf.Tensor]:
        """Returns the sums of the earlier gradients of this update."""
        optimizer = self._optimizer
        kept = [accumulated_by(optimizer)[place_of(optimizer, variable)] for variable in self._variables]
        return [tf.convert_to_tensor(variable.value) for variable in kept]

    def _counted(self, parts: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of squared deviations including one more gradient, by Welford's method."""
        optimizer, sums = self._optimizer, []
        number = tf.convert_to_tensor(apply_count(optimizer).value) % optimizer.gradient_accumulation_steps + 1
        for part, before, variable in zip(parts, self._before(), self._variables, strict=True):
            total = tf.convert_to_tensor(self._sums(variable).value)
            count, earlier = tf.cast(number, total.dtype), tf.cast(tf.maximum(number - 1, 1), total.dtype)
            square = tf.square(tf.cast(part, total.dtype) - tf.cast(before, total.dtype) / earlier)
            square = square if total.shape.rank or not square.shape.rank else tf.reduce_sum(square)
            sums.append(tf.where(number > 1, total + square * (count - 1) / count, tf.zeros_like(total)))
        return sums


def _assign_all(strategy: Any, variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        strategy.extended.update(variable, lambda copy, new: copy.assign(new), args=(value,), group=False)


def dtype_of_sums(variable: Any) -> tf.DType:
    """Returns the dtype for sums of a variable's squared gradients, which may be too small for 16 bits.

    Args:
        variable: a Keras or TensorFlow variable.
    """
    dtype = tf.as_dtype(keras.backend.standardize_dtype(variable.dtype))
    return dtype if dtype.size >= 4 else tf.float32
