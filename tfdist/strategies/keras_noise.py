"""The seam of Keras between the sum of gradients over replicas and their clipping, where noise is added to them.

The seams that sum gradients (`keras_optimizers`, `tfdist.optimizers.keras_optimizers`) run around this one: they
install it first. Accumulated gradients come here as means, and unscaled, once per update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.private.keras import base_optimizer
from tfdist.seams.registry import replace

_ATTRIBUTE = "_tfdist_noise"
_installed = False


class _Noise:
    """What changes the gradients of an optimizer.

    Attributes:
        added: takes gradients and their variables, and returns other gradients.
        variables: those of the gradients that are about to be changed.
    """

    def __init__(self, added: Callable[[list[Any], Sequence[Any]], list[Any]]) -> None:
        self.added = added
        self.variables: Sequence[Any] = ()


def attach(optimizer: Any, added: Callable[[list[Any], Sequence[Any]], list[Any]]) -> None:
    """Changes the gradients of an optimizer after they have been summed, and before they are clipped.

    Args:
        optimizer: of Keras, which applies gradients itself.
        added: takes gradients and their variables, and returns other gradients. Called by each replica.
    """
    setattr(optimizer, _ATTRIBUTE, _Noise(added))


def install() -> None:
    """Installs the seam, once."""
    global _installed
    if _installed:
        return
    _installed = True
    replace(base_optimizer.BaseOptimizer, "_backend_apply_gradients", _knowing_the_variables)
    replace(base_optimizer.BaseOptimizer, "_clip_gradients", _noisy_first)


def _knowing_the_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    def _backend_apply_gradients(self: Any, grads: Any, trainable_variables: Any) -> Any:
        noise = getattr(self, _ATTRIBUTE, None)
        if noise is not None:
            noise.variables = tuple(trainable_variables)
        return original(self, grads, trainable_variables)

    return _backend_apply_gradients


def _noisy_first(original: Callable[..., Any]) -> Callable[..., Any]:
    def _clip_gradients(self: Any, grads: Any) -> Any:
        noise = getattr(self, _ATTRIBUTE, None)
        return original(self, grads if noise is None else noise.added(list(grads), noise.variables))

    return _clip_gradients
