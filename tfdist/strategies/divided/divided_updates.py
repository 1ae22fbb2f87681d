"""Seams for Keras optimizers whose variables are on several processes, each of which updates its own.

Norms of gradients cover those of all processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.private.keras import base_optimizer, tf_optimizer
from tfdist.private.optimizers import averages_of, strategy_of, variables_of
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided.dealing import contained
from tfdist.strategies.divided_abilities import DividesUpdates
from tfdist.tensors import map_values
from tfdist.thread_values import ThreadValue


class _GradientShares(NamedTuple):
    """How much each gradient counts here; a weight on several processes counts once in all.

    Attributes:
        parts: fraction that each gradient counts; None outside of `gradient_shares`.
        cut: fraction that each gradient of a part counts among the processes that have the weight's parts; 0 for that
            of a whole weight.
    """

    parts: Sequence[float] | None = None
    cut: Sequence[float] = ()


_counted = ThreadValue(_GradientShares())
"""How much each gradient of a thread counts."""


@Once
def install() -> None:
    """Installs the seams, once."""
    replace(base_optimizer, "global_norm", _over_all_processes)
    replace(base_optimizer.BaseOptimizer, "_clip_gradients", _clipped_over_rows)
    replace(tf_optimizer.TFOptimizer, "_overwrite_model_variables_with_average_value", _restrict_to_held)
    replace(base_optimizer.BaseOptimizer, "_update_model_variables_moving_average", _restrict_to_held)
    replace(base_optimizer.BaseOptimizer, "_backend_reset_gradient_accumulators", _of_own_accumulators)
    replace(base_optimizer.BaseOptimizer, "finalize_variable_values", _published)
    for name in ("_tf_swap_variables", "_tf_finalize_ema_values"):
        replace(keras.callbacks.SwapEMAWeights, name, _swapping_own_variables)


def gradient_shares(parts: Sequence[float], cut: Sequence[float] = ()) -> contextlib.AbstractContextManager[None]:
    """Context in which an optimizer gets the gradients of the variables that this process updates.

    Args:
        parts: fraction that each gradient counts here; 1/n for a weight that n processes update.
        cut: fraction that each gradient of a part counts among the processes of ``over_parts``, 1/n if n of them have
            the same part; 0 for that of a whole weight. By default all weights are whole.
    """
    return _counted.set_to(_GradientShares(parts, cut))


def _over_all_processes(original: Callable[..., Any]) -> Callable[..., Any]:
    def global_norm(gradients: Sequence[Any]) -> Any:
        extended = current_strategy.current(DividesUpdates)
        parts = _counted.value.parts
        if extended is None or parts is None:
            return original(gradients)
        squares = [
            tf.cast(part, tf.float64) * _square(gradient) for gradient, part in zip(gradients, parts, strict=True)
        ]
        here = tf.add_n(squares) if squares else tf.constant(0.0, tf.float64)
        total = extended.over_updaters.all_reduce([here], names=["the norm of gradients"])[0]
        return tf.cast(tf.sqrt(total), gradients[0].dtype if squares else total.dtype)

    return global_norm


def _clipped_over_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Clips gradients of rows by the norm of the whole gradient. Keras's own clipping then finds nothing to clip."""

    def _clip_gradients(self: Any, grads: Sequence[Any]) -> Any:
        extended = current_strategy.current(DividesUpdates)
        fractions = _counted.value.cut
        cut = [place for place, fraction in enumerate(fractions) if fraction]
        if not self.clipnorm or self.clipnorm <= 0 or extended is None or not cut:
            return original(self, grads)
        here = tf.stack([tf.constant(fractions[place], tf.float64) * _square(grads[place]) for place in cut])
        squares = extended.over_parts.all_reduce([here], names=["the norms of gradients of parts"])[0]
        clipped = list(grads)
        for place, square in zip(cut, tf.unstack(squares), strict=True):
            limit = tf.constant(self.clipnorm, tf.float64)
            clipped[place] = _times(grads[place], limit / tf.maximum(tf.sqrt(square), limit))
        return original(self, clipped)

    return _clip_gradients


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    return map_values(lambda tensor: tensor * tf.cast(factor, tensor.dtype), gradient)


def _square(gradient: Any) -> tf.Tensor:
    """Squares a gradient as Keras does for norms: rows of an embedding that occur several times are squared singly."""
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    wide = values.dtype if values.dtype.size >= 4 else tf.float32
    return tf.cast(tf.reduce_sum(tf.square(tf.cast(values, wide))), tf.float64)


def _restrict_to_held(original: Callable[..., Any]) -> Callable[..., Any]:
    """Restricts a method to this process's weights and their moving averages."""

    def method(self: Any, variables: Sequence[Any]) -> Any:
        averages = averages_of(self)
        pairs = list(zip(variables, averages, strict=False))
        held = [pair for pair in pairs if _is_held(*pair)]
        if len(held) == len(pairs):
            return original(self, variables)
        with _temporary_attribute(self, "_model_variables_moving_average", [average for _, average in held]):
            return original(self, [variable for variable, _ in held])

    return method


def _is_held(variable: Any, average: Any) -> bool:
    """Returns whether this process holds a variable and its average; a variable that its gradient replaces has none."""
    return not any(described_variables.is_elsewhere(part) for part in (variable, average) if part is not None)


def _swapping_own_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, optimizer: Any) -> Any:
        with _updating(optimizer):
            pairs = zip(variables_of(optimizer), averages_of(optimizer), strict=True)
            held = [pair for pair in pairs if _is_held(*pair)]
            with (
                _temporary_attribute(optimizer, "_trainable_variables", [variable for variable, _ in held]),
                _temporary_attribute(optimizer, "_model_variables_moving_average", [average for _, average in held]),
            ):
                return original(self, optimizer)

    return method


def _published(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gives all processes the values of variables that their owners have replaced by moving averages."""

    def finalize_variable_values(self: Any, var_list: Any) -> Any:
        if not self.use_ema:
            return original(self, var_list)
        with _updating(self):
            return original(self, var_list)

    return finalize_variable_values


@contextlib.contextmanager
def _updating(optimizer: Any) -> Iterator[None]:
    """Context in which a process assigns values to its own part of the variables; after it all processes have them."""
    with contextlib.ExitStack() as stack:
        for updating in contained([optimizer]):
            extended = current_strategy.of_strategy(strategy_of(updating), DividesUpdates)
            if extended is not None:
                stack.enter_context(extended.updating(updating))
        yield


def _of_own_accumulators(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_reset_gradient_accumulators(self: Any) -> Any:
        kept = self._accumulated_gradients
        held = [
            accumulator
            for accumulator in kept
            if accumulator is None or not described_variables.is_elsewhere(accumulator)
        ]
        with _temporary_attribute(self, "_accumulated_gradients", held):
            return original(self)

    return _backend_reset_gradient_accumulators


@contextlib.contextmanager
def _temporary_attribute(optimizer: Any, name: str, value: Any) -> Iterator[None]:
    """Context in which an attribute has another value, without Keras's tracking of assigned attributes."""
    before, optimizer.__dict__[name] = optimizer.__dict__[name], value
    try:
        yield
    finally:
        optimizer.__dict__[name] = before
