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
        ValueError: this is no optimizer.
        TypeError: Keras does not know its class.
    """
    # Keras changes the dictionary that it gets. `keras.optimizers.deserialize` does not know `Lamb` in some versions.
    optimizer = keras.saving.deserialize_keras_object(copy.deepcopy(config))
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        name = config.get("class_name")
        raise ValueError(f"Keras cannot make the optimizer {name} from its description; register it as serializable")
    return optimizer
