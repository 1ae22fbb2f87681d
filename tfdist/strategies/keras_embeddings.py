"""Keras optimizers leave rows behind anchors (`tfdist.strategies.embedded_rows`) to their tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.keras import base_optimizer
from tfdist.seams.registry import replace
from tfdist.strategies import at_work, sequential_build
from tfdist.strategies.embedded_rows import rows_of
from tfdist.strategies.shares import Shares, weighed


def install() -> None:
    """Installs the seams."""
    replace(base_optimizer.BaseOptimizer, "apply", _without_rows)
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _of_values)
    sequential_build.replace_build(_with_integer_keys)


def _without_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Rows are updated by their tables, after the other variables: these wait for the chief's first values."""

    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if len(variables) != len(grads) or all(rows_of(variable) is None for variable in variables):
            return original(self, grads, trainable_variables)
        if not self.built:  # with the anchors, as Keras does when it loads a model
            with tf.init_scope(), keras.name_scope(self.name):
                self.build(variables)
        rest = [pair for pair in zip(grads, variables, strict=True) if rows_of(pair[1]) is None]
        if any(gradient is not None for gradient, _ in rest):
            original(self, *map(list, zip(*rest, strict=True)))
        else:
            self._iterations.assign_add(1)
        for gradient, variable in zip(grads, variables, strict=True):
            rows = rows_of(variable)
            if rows is not None and gradient is not None:
                weighing = at_work.weighing()
                rows.update(self, gradient if weighing is None else _part_of_mean(gradient, weighing.shares))
        return None

    return apply


def _part_of_mean(gradient: Any, shares: Shares) -> Any:
    """A replica's part of the gradient of all samples' mean: the parts' sum. It has no keys of a stand-in row."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    keys = tf.where(shares.is_empty(), 0, tf.size(gradient.indices))
    whole = weighed(gradient, shares.weight())
    return tf.IndexedSlices(whole.values[:keys], whole.indices[:keys], whole.dense_shape)


def _of_values(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sparse gradients are finite if their values are: Keras makes them dense, which rows for any key cannot be."""

    def check_finite(self: Any, grads: Any) -> Any:
        return original(self, [one.values if isinstance(one, tf.IndexedSlices) else one for one in grads])

    return check_finite


def _with_integer_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """A model without an `Input` takes keys as they are; Keras would cast them to the floats of the first layer."""

    def build(self: Any, input_shape: Any = None) -> None:
        dtype = getattr(self._layers[0], "dtype_of_keys", None) if self._layers else None
        is_one = isinstance(input_shape, (tuple, list)) and all(isinstance(one, int | None) for one in input_shape)
        if dtype is not None and is_one:
            self._layers = [keras.layers.InputLayer(batch_shape=tuple(input_shape), dtype=dtype), *self._layers]
        original(self, input_shape)

    return build
