"""Loading models whose layers were in device scopes."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.model_parallel import keras_placement


def load_model(filepath: Any, custom_objects: Any = None, compile: bool = True, safe_mode: bool = True) -> Any:
    """`keras.saving.load_model`, for models that were saved with layers in a `tfdist.device_scope`.

    Layers compute, and variables live, on the devices that they had; those that this process lacks are left to Keras,
    with a warning. Keras's own function does the same once this process has used a `tfdist.device_scope`; before, it
    loads the model without its devices.

    Args:
        filepath: as of `keras.saving.load_model`.
        custom_objects: as of `keras.saving.load_model`.
        compile: as of `keras.saving.load_model`.
        safe_mode: as of `keras.saving.load_model`.

    Returns:
        The model.

    Raises:
        ValueError: of Keras.
    """
    keras_placement.install()
    return keras.saving.load_model(filepath, custom_objects, compile=compile, safe_mode=safe_mode)
