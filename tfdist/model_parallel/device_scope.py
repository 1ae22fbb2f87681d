"""`tfdist.device_scope`: layers that are called in it compute there, and variables that are made in it live there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.model_parallel import keras_placement, placed_gradients
from tfdist.private import tensorflow as private
from tfdist.strategies.devices import device_names


@contextlib.contextmanager
def device_scope(device: str) -> Iterator[None]:
    """Context whose layers compute on a device, forward and backward.

    A layer that is *called* in it computes there, each time that its model runs; called in two scopes, it computes on
    both. A variable that is *created* in it lives there, with what an optimizer keeps for it. In functional,
    sequential and subclassed models; in subclassed ones, `call` enters the scope. The innermost scope counts.

    The first scope changes what Keras and TensorFlow do in this process: see `tfdist.model_parallel.keras_placement`.

    Args:
        device: such as ``"GPU:1"``, ``"/gpu:1"`` or ``"CPU"``, of this process.

    Raises:
        ValueError: there is no such device, or XLA compiles what is made in the scope.
    """
    name = device_names.resolved(device)
    if private.is_compiled_by_xla():
        raise ValueError(
            f"tfdist.device_scope({device!r}): XLA compiles a model for one device. Compile the model with "
            "jit_compile=False."
        )
    keras_placement.install()
    with placed_gradients.placed(name):
        yield
