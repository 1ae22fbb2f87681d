"""Gradients through collectives between replicas, in steps whose gradients are weighted by samples.

A replica's gradient is multiplied by the replica's weight w after back-propagation. The gradient that flows back
through a collective, as in synchronized batch normalization, comes from the losses of all replicas, and each loss must
count by its own replica's weight. So this gradient is multiplied by the weight of the replica that sends it, and
divided by the weight of the replica that receives it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.engine import host_calls
from tfdist.private import tensorflow as private
from tfdist.seams.registry import replace
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.data.shares import weighed


def install() -> None:
    """Installs the seams for collectives."""
    replace(private.ReplicaContext, "all_reduce", _all_reduce)
    replace(private.ReplicaContext, "all_gather", _all_gather)


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        return _weighing_back(self, lambda given: original(self, reduce_op, given, options), value, options)

    return all_reduce


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(self: Any, value: Any, axis: int, options: Any = None) -> Any:
        return _weighing_back(self, lambda given: original(self, given, axis, options), value, options)

    return all_gather


def _weighing_back(context: Any, collective: Callable[[Any], Any], value: Any, options: Any) -> Any:
    """Returns the result of a collective, with a weighted gradient."""
    if current_strategy.current(DataParallel) is not None:
        host_calls.check("a collective")
    if isinstance(options, private.WeighedOptions):
        return collective(value)
    return received(collective(sent(value)))


def sent(value: Any) -> Any:
    """Returns a value, in any structure, as a replica gives it to a collective: its gradient is for the replica."""
    extended = current_strategy.sharing()
    if extended is None:
        return value
    factor = tf.math.reciprocal_no_nan(extended.shares.weight())
    return tf.nest.map_structure(lambda part: _with_gradient_times(part, factor), value)


def received(value: Any) -> Any:
    """Returns a value, in any structure, as a replica gets it by a collective: its gradient counts by the replica."""
    extended = current_strategy.sharing()
    if extended is None:
        return value
    weight = extended.shares.weight()
    return tf.nest.map_structure(lambda part: _with_gradient_times(part, weight), value)


def _with_gradient_times(value: Any, factor: tf.Tensor) -> Any:
    """Returns the same value, with its gradient multiplied by a factor."""
    if isinstance(value, tf.IndexedSlices):
        return value
    tensor = tf.convert_to_tensor(value)
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tensor

    @tf.custom_gradient
    def identity(given: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
        return tf.identity(given), lambda gradient: _times(gradient, factor)

    return identity(tensor)


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    """Returns a gradient times a factor. Losses that depend on the product have gradients that cross the same border.

    They count by the replica, too, and the product itself is counted so on one side already: what crosses by it stays
    as it is.
    """
    if isinstance(gradient, tf.IndexedSlices):
        return weighed(gradient, factor)

    @tf.custom_gradient
    def product(given: tf.Tensor) -> tuple[tf.Tensor, Callable[[Any], Any]]:
        return weighed(given, factor), lambda gradient: _with_gradient_times(gradient, factor)

    return product(gradient)
