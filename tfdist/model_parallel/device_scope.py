"""`tfdist.device_scope`: a context that puts layers' computations and variables on a device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tfdist.model_parallel import keras_placement, placed_gradients
from tfdist.private import graphs
from tfdist.strategies.devices import device_names


@contextlib.contextmanager
def device_scope(device: str) -> Iterator[None]:
    """Context whose layers compute on a device, forward and backward.

    A layer that is *called* in the scope computes on the device, each time that its model runs; a layer that is called
    in two scopes computes on both devices. A variable that is *created* in the scope lives on the device, with what an
    optimizer keeps for it. This works in functional, sequential and subclassed models; in subclassed ones, `call`
    enters the scope. The innermost scope counts.

    The first scope patches Keras and TensorFlow in this process: see `tfdist.model_parallel.keras_placement`.

    Args:
        device: a device of this process, such as ``"GPU:1"``, ``"/gpu:1"`` or ``"CPU"``.

    Raises:
        ValueError: the device does not exist, or XLA compiles what is made in the scope.
    """
    name = device_names.resolved(device)
    if graphs.is_compiled_by_xla():
        raise ValueError(
            f"tfdist.device_scope({device!r}): XLA compiles a model for one device. Compile the model with "
            "jit_compile=False."
        )
    keras_placement.install()
    with placed_gradients.placed(name):
        yield
