"""Noise that is added to an optimizer's gradients after they are summed and before they are clipped.

With gradient accumulation, noise is added once per update, to the unscaled means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfdist.seams.once import Once
from tfdist.seams.optimizer import OptimizerHooks, Update, points

_ATTRIBUTE = "_tfdist_noise"


class Noisy(OptimizerHooks):
    """The hook that changes an optimizer's gradients.

    Args:
        added: function of gradients and their variables that returns changed gradients.
    """

    def __init__(self, added: Callable[[list[Any], Sequence[Any]], list[Any]]) -> None:
        self._added = added

    def gradients(self, update: Update, gradients: list[Any]) -> list[Any]:
        """Returns the changed gradients."""
        return self._added(gradients, update.variables)


def attach(optimizer: Any, added: Callable[[list[Any], Sequence[Any]], list[Any]]) -> None:
    """Has an optimizer's gradients changed after they are summed, and before they are clipped.

    Args:
        optimizer: Keras optimizer that applies gradients itself.
        added: function of gradients and their variables that returns changed gradients; each replica calls it.
    """
    setattr(optimizer, _ATTRIBUTE, Noisy(added))


@Once
def install() -> None:
    """Installs the hook, once."""
    points.provide([Noisy], _hooks_of)


def _hooks_of(optimizer: Any) -> list[Noisy]:
    noisy = getattr(optimizer, _ATTRIBUTE, None)
    return [] if noisy is None else [noisy]
