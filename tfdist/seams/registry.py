"""The registry of seams: the wrappers of each replaced function.

A *wrapper* is given the function within it, and returns a function that may call that. Wrappers of one function are
nested in the order of `tfdist.seams.order`, not in the order of installation: a feature that is first used late may
add its wrapper inside one that is installed already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tfdist.seams.order import place_of
from tfdist.seams.signatures import check, key_of

Function = Callable[..., Any]
Wrapper = Callable[[Function], Function]


@dataclass
class _Seam:
    """A replaced function.

    Attributes:
        original: the function before the replacement.
        wrappers: the wrappers, inner to outer.
        standing: the function that is in place now.
    """

    original: Function
    wrappers: list[Wrapper] = field(default_factory=list)
    standing: Function | None = None


_seams: dict[tuple[Any, str], _Seam] = {}


def replace(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Puts a wrapper around a function of Keras or TensorFlow.

    If other code has replaced the function since the last wrapper, the new one goes around that code's function.

    Args:
        owner: a class, or a module.
        name: name of the function.
        wrapper: function that makes the replacement from the function within it. It is called again when another
            wrapper is added.

    Raises:
        IncompatibleKerasError: there is no such function, or it has other parameters than tfdist knows.
    """
    seam = _seams.get((owner, name))
    if seam is None or getattr(owner, name, None) is not seam.standing:
        seam = _seams[owner, name] = _Seam(check(owner, name))
    seam.wrappers.append(wrapper)
    seam.wrappers.sort(key=lambda wrapper: place_of(_function_of(wrapper).__module__))  # a stable sort
    seam.standing = functools.reduce(_around, seam.wrappers, seam.original)
    setattr(owner, name, seam.standing)


def standing() -> dict[str, list[str]]:
    """Returns the wrappers of each replaced function, outer to inner: their modules and names, by function name."""
    return {
        key_of(owner, name): [
            f"{_function_of(wrapper).__module__.removeprefix('tfdist.')}.{_function_of(wrapper).__qualname__}"
            for wrapper in reversed(seam.wrappers)
        ]
        for (owner, name), seam in _seams.items()
    }


def _around(within: Function, wrapper: Wrapper) -> Function:
    return functools.wraps(within)(wrapper(within))


def _function_of(wrapper: Wrapper) -> Any:
    return wrapper.func if isinstance(wrapper, functools.partial) else wrapper
