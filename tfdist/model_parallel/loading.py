"""Loads models whose layers were in device scopes."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.model_parallel import keras_placement


def load_model(filepath: Any, custom_objects: Any = None, compile: bool = True, safe_mode: bool = True) -> Any:
    """Loads a model that was saved with layers in a `tfdist.device_scope`; see `keras.saving.load_model`.

    Layers compute, and variables live, on the devices that they had. Devices that this process lacks are left to Keras,
    with a warning. Keras's own function does the same once this process has used a `tfdist.device_scope`; before, it
    loads the model without its devices.

    Args:
        filepath: path of the saved model.
        custom_objects: custom classes and functions by name.
        compile: whether to compile the model as it was saved.
        safe_mode: whether to refuse the unsafe deserialization of lambdas.

    Returns:
        The model.

    Raises:
        ValueError: Keras cannot load the model.
    """
    keras_placement.install()
    return keras.saving.load_model(filepath, custom_objects, compile=compile, safe_mode=safe_mode)
