"""Seams for `Sequential.build`, also of models that were made before a seam was installed.

Keras stores in each layer the `build` that its class had when the layer was made. An older model gets the seams when a
layer is added to it, or when it is called.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.seams.registry import replace

Seam = Callable[[Callable[..., Any]], Callable[..., Any]]

_SEAMS = "tfdist_seams"
"""Attribute of a `build`: the seams that it has. Keras's wrapper of a `build` copies the attribute."""
_installed: list[Seam] = []


def replace_build(seam: Seam) -> None:
    """Installs a seam for `build`.

    Args:
        seam: function that makes the replacement from the original.
    """
    if not _installed:
        replace(keras.Sequential, "add", _adding)
        keras.Sequential.__call__ = _called
    _installed.append(seam)
    original = keras.Sequential.build
    replace(keras.Sequential, "build", seam)
    _note(keras.Sequential.build, original, seam)


def _adding(original: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: Any, *args: Any, **kwargs: Any) -> Any:
        _with_seams(self)
        return original(self, *args, **kwargs)

    return add


def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    _with_seams(self)
    return super(keras.Sequential, self).__call__(*args, **kwargs)


def _with_seams(model: Any) -> None:
    """Gives a model the seams that were installed after it was made."""
    for seam in _installed:
        kept = model.build
        if seam in getattr(kept, _SEAMS, ()):
            continue
        build = seam(functools.partial(_without_model, kept))
        model.build = functools.wraps(kept)(functools.partial(build, model))
        _note(model.build, kept, seam)


def _without_model(build: Callable[..., Any], _: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a bound `build`, without the model that a seam passes."""
    return build(*args, **kwargs)


def _note(build: Any, original: Any, seam: Seam) -> None:
    setattr(build, _SEAMS, (*getattr(original, _SEAMS, ()), seam))
