"""Gradients through collectives between replicas, in steps whose gradients are weighed by samples.

A replica's gradient is multiplied by its weight w after back-propagation. What flows back through a collective, as with
synchronized batch normalization, comes from the losses of all replicas, and each must count by its own weight: so it is
multiplied by the weight of the replica that it comes from before it is sent, and divided by that of the replica that
it goes to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies import at_work
from tfdist.strategies import tensorflow_private as private
from tfdist.strategies.shares import weighed


def install(replace: Callable[..., None]) -> None:
    """Puts the seams of collectives in place.

    Args:
        replace: puts one function in the place of another.
    """
    for name in ("all_reduce", "all_gather"):
        replace(private.ReplicaContext, name, _with_weighed_gradient)


def _with_weighed_gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def collective(self: Any, first: Any, second: Any, options: Any = None) -> Any:
        extended = at_work.of_strategy(self.strategy)
        if extended is None or not extended.shares.active or isinstance(options, private.WeighedOptions):
            return original(self, first, second, options)
        weight = extended.shares.weight()
        inverse = tf.math.reciprocal_no_nan(weight)

        def back(value: Any, factor: tf.Tensor) -> Any:
            return tf.nest.map_structure(lambda part: _with_gradient_times(part, factor), value)

        # all_reduce(reduce_op, value, options), all_gather(value, axis, options)
        if original.__name__ == "all_reduce":
            return back(original(self, first, back(second, inverse), options), weight)
        return back(original(self, back(first, inverse), second, options), weight)

    return collective


def _with_gradient_times(value: Any, factor: tf.Tensor) -> Any:
    """The value, whose gradient is multiplied by a factor."""
    if isinstance(value, tf.IndexedSlices):
        return value
    tensor = tf.convert_to_tensor(value)
    if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
        return tensor

    @tf.custom_gradient
    def identity(given: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.identity(given), lambda gradient: weighed(gradient, factor)

    return identity(tensor)
