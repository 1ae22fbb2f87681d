"""Noise that is added to the gradients of an optimizer, when they have been summed and before they are clipped.

Accumulated gradients come here as means, and unscaled, once per update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.seams.once import Once
from tfdist.seams.optimizer import OptimizerHooks, Update, points

_ATTRIBUTE = "_tfdist_noise"


class Noisy(OptimizerHooks):
    """The hook of an optimizer whose gradients are changed.

    Args:
        added: takes gradients and their variables, and returns other gradients.
    """

    def __init__(self, added: Callable[[list[Any], Sequence[Any]], list[Any]]) -> None:
        self._added = added

    def gradients(self, update: Update, gradients: list[Any]) -> list[Any]:
        """Changes them."""
        return self._added(gradients, update.variables)


def attach(optimizer: Any, added: Callable[[list[Any], Sequence[Any]], list[Any]]) -> None:
    """Changes the gradients of an optimizer after they have been summed, and before they are clipped.

    Args:
        optimizer: of Keras, which applies gradients itself.
        added: takes gradients and their variables, and returns other gradients. Called by each replica.
    """
    setattr(optimizer, _ATTRIBUTE, Noisy(added))


@Once
def install() -> None:
    """Installs the hook, once."""
    points.provide([Noisy], _hooks_of)


def _hooks_of(optimizer: Any) -> list[Noisy]:
    noisy = getattr(optimizer, _ATTRIBUTE, None)
    return [] if noisy is None else [noisy]
