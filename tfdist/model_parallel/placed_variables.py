"""Patches of Keras ("seams") that place variables as a device scope asks, and an optimizer's variables beside them.

| seam | why |
|---|---|
| variables | Keras may make a variable later than it was asked for, outside the scope |
| `add_variable_from_reference` of optimizers | slots are on the device of their variable |
| `_distributed_tf_update_step`, weight decay and accumulation of optimizers | updates run there, too |
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.model_parallel import keras_placement_saving
from tfdist.private.keras import tf_core, tf_optimizer
from tfdist.private.models import value_of
from tfdist.seams.registry import replace
from tfdist.strategies.devices import requested_device
from tfdist.strategies.devices.requested_device import DEVICE


def install() -> None:
    """Installs the seams."""
    replace(tf_core.Variable, "__init__", _remembering_the_scope)
    replace(tf_core.Variable, "_initialize", _on_the_device)
    replace(tf_optimizer.TFOptimizer, "add_variable_from_reference", _beside_the_variable)
    replace(tf_optimizer.TFOptimizer, "_distributed_tf_update_step", _where_the_variables_are)
    replace(tf_optimizer.TFOptimizer, "_apply_weight_decay", _decayed_where_they_are)
    replace(tf_optimizer.TFOptimizer, "_backend_increment_gradient_accumulators", _accumulated_where_they_are)


def _remembering_the_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        setattr(self, DEVICE, requested_device.current())
        original(self, *args, **kwargs)

    return __init__


def _on_the_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def _initialize(self: Any, value: Any) -> Any:
        device = keras_placement_saving.device_of(self) or getattr(self, DEVICE, None)
        if device is None:
            return original(self, value)
        with requested_device.requested(device), tf.device(device):
            original(self, value)
        lives_on(self, device)

    return _initialize


def lives_on(variable: Any, device: str) -> None:
    """Notes the device of a variable, so that optimizers keep their variables for it there.

    Args:
        variable: a Keras variable.
        device: device of the variable.
    """
    setattr(variable, DEVICE, device)
    setattr(value_of(variable), DEVICE, device)


def _beside_the_variable(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_variable_from_reference(self: Any, reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        device = _place_of(reference_variable)
        if device is None:
            return original(self, reference_variable, *args, **kwargs)
        with requested_device.requested(device), tf.device(device):
            return original(self, reference_variable, *args, **kwargs)

    return add_variable_from_reference


def _where_the_variables_are(original: Callable[..., Any]) -> Callable[..., Any]:
    def _distributed_tf_update_step(self: Any, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        for device, group in itertools.groupby(grads_and_vars, lambda pair: _place_of(pair[1])):
            with tf.device(device) if device is not None else contextlib.nullcontext():
                original(self, distribution, list(group), learning_rate)

    return _distributed_tf_update_step


def _decayed_where_they_are(original: Callable[..., Any]) -> Callable[..., Any]:
    def _apply_weight_decay(self: Any, variables: Any) -> None:
        for device, group in itertools.groupby(variables, _place_of):
            with tf.device(device) if device is not None else contextlib.nullcontext():
                original(self, list(group))

    return _apply_weight_decay


def _accumulated_where_they_are(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_increment_gradient_accumulators(self: Any, grads: Any, acc_grads: Any) -> None:
        pairs = zip(grads, acc_grads, strict=True)
        for device, group in itertools.groupby(pairs, lambda pair: _place_of(pair[1])):
            with tf.device(device) if device is not None else contextlib.nullcontext():
                original(self, *map(list, zip(*group, strict=True)))

    return _backend_increment_gradient_accumulators


def _place_of(variable: Any) -> str | None:
    """Returns the device of a Keras or TensorFlow variable, if a scope asked for it; None otherwise."""
    return getattr(variable, DEVICE, None)
