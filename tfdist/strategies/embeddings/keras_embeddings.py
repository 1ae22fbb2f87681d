"""Hooks of Keras optimizers that leave rows behind anchors (`tfdist.strategies.embeddings.embedded_rows`) to tables."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.optimizers import apply_count, variables_of
from tfdist.seams import optimizer
from tfdist.seams.once import Once
from tfdist.strategies import current_strategy
from tfdist.strategies.data.shares import Shares, weighed
from tfdist.strategies.embeddings.embedded_rows import rows_of
from tfdist.strategies.keras import sequential_build


@Once
def install() -> None:
    """Installs the seams."""
    optimizer.points.provide([WithoutRows], lambda _: [WithoutRows()])
    sequential_build.replace_build(_with_integer_keys)


class WithoutRows(optimizer.OptimizerHooks):
    """Hooks that have tables update rows, after the other variables, which wait for the chief's first values."""

    def apply(self, call: optimizer.OptimizerCall) -> contextlib.AbstractContextManager[None] | None:
        """Separates the gradients of rows from those of other variables."""
        given, gradients = call.arguments["trainable_variables"], call.arguments["grads"]
        if not call.applies_itself:
            return None
        variables = variables_of(call.optimizer) if given is None else list(given)
        if len(variables) != len(gradients) or all(rows_of(variable) is None for variable in variables):
            return None
        return _split(call, list(gradients), variables)


@contextlib.contextmanager
def _split(call: optimizer.OptimizerCall, gradients: list[Any], variables: list[Any]) -> Iterator[None]:
    if not call.optimizer.built:  # with the anchors, as when Keras loads a model
        with tf.init_scope(), keras.name_scope(call.optimizer.name):
            call.optimizer.build(variables)
    rest = [pair for pair in zip(gradients, variables, strict=True) if rows_of(pair[1]) is None]
    if any(gradient is not None for gradient, _ in rest):
        call.arguments["grads"], call.arguments["trainable_variables"] = map(list, zip(*rest, strict=True))
    else:
        call.replace(lambda: apply_count(call.optimizer).assign_add(1))
    yield
    for gradient, variable in zip(gradients, variables, strict=True):
        rows = rows_of(variable)
        if rows is not None and gradient is not None:
            sharing = current_strategy.sharing()
            rows.update(call.optimizer, gradient if sharing is None else _part_of_mean(gradient, sharing.shares))


def _part_of_mean(gradient: Any, shares: Shares) -> Any:
    """Returns a replica's part of the global mean's gradient, without keys of a stand-in row; parts are summed."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    keys = tf.where(shares.is_empty(), 0, tf.size(gradient.indices))
    whole = weighed(gradient, shares.weight())
    return tf.IndexedSlices(whole.values[:keys], whole.indices[:keys], whole.dense_shape)


def _with_integer_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Has a model without an `Input` take keys as they are; Keras would cast them to the first layer's floats."""

    def build(self: Any, input_shape: Any = None) -> None:
        dtype = getattr(self._layers[0], "dtype_of_keys", None) if self._layers else None
        is_one = isinstance(input_shape, (tuple, list)) and all(isinstance(size, int | None) for size in input_shape)
        if dtype is not None and is_one:
            self._layers = [keras.layers.InputLayer(batch_shape=tuple(input_shape), dtype=dtype), *self._layers]
        original(self, input_shape)

    return build
