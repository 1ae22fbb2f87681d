"""Makes Keras optimizers from what workers send of them."""

from __future__ import annotations

import copy
from typing import Any

import keras


def deserialized(config: dict[str, Any]) -> Any:
    """Returns the optimizer of a serialized form, which stays as it is: it is sent on, and is part of snapshots.

    Args:
        config: the optimizer, serialized by `keras.saving.serialize_keras_object`.

    Raises:
        ValueError: Keras does not know the optimizer, as some versions do not know `keras.optimizers.Lamb`.
    """
    optimizer = keras.optimizers.deserialize(copy.deepcopy(config))  # Keras changes the dictionary that it gets
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        name = config.get("class_name")
        raise ValueError(f"Keras cannot make the optimizer {name} from its description; register it as serializable")
    return optimizer
