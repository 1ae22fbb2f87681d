"""`enable_keras_distribution`: `keras.distribution`, which Keras has for JAX, on TensorFlow."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.distribution import current, devices, layouts
from tfdist.private.keras import tf_distribution
from tfdist.seams.once import Once
from tfdist.strategies import require_tensorflow


def enable_keras_distribution(strict: bool = False) -> None:
    """Lets scripts that use `keras.distribution` train on the processes of a job, or on a process's local devices.

    Call it once, before anything of `keras.distribution`. A `keras.distribution.DataParallel` then trains as
    `AllReduceStrategy`, a `keras.distribution.ModelParallel` as ``AllReduceStrategy(shard="weights")``, of which each
    process keeps rows of those weights that a layout divides. Does nothing where Keras brings its own.

    Example:
        >>> tfdist.enable_keras_distribution()
        >>> keras.distribution.set_distribution(keras.distribution.DataParallel())

    Args:
        strict: whether a `keras.distribution.LayoutMap` none of whose keys match a model is an error, not a warning.
    """
    require_tensorflow()
    current.settings.strict = strict
    if _bring.is_done or not hasattr(tf_distribution, "initialize"):
        _bring()


@Once
def _bring() -> None:
    """Puts in place what Keras's backend lacks."""
    current.install()
    brought = {
        "initialize": devices.initialize,
        "list_devices": devices.names,
        "get_device_count": devices.number_of,
        "num_processes": devices.count,
        "process_id": devices.process,
        "distribute_tensor": _distribute_tensor,
    }
    for name, function in brought.items():
        setattr(tf_distribution, name, function)
    if not hasattr(keras.distribution, "get_device_count"):  # Keras 3.10
        keras.distribution.get_device_count = devices.number_of


def _distribute_tensor(tensor: Any, layout: Any) -> Any:
    """Returns a tensor, or a structure of tensors, as it is: a process has whole activations of its share."""
    layouts.keep_together(layout)
    return tensor
