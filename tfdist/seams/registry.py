"""The registry of seams: what stands on each replaced function.

A *wrapper* is given the function within it, and makes one that calls it or not. Wrappers of one function stand around
each other in the order of `tfdist.seams.order`, whichever of them came first: one of a feature that is used late may
be within another one that has stood there for long.
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
        original: what stood there before.
        wrappers: inner to outer.
        standing: what stands there now.
    """

    original: Function
    wrappers: list[Wrapper] = field(default_factory=list)
    standing: Function | None = None


_seams: dict[tuple[Any, str], _Seam] = {}


def replace(owner: Any, name: str, wrapper: Wrapper) -> None:
    """Puts a wrapper around a function of Keras or TensorFlow.

    Where somebody else has replaced the function since, it goes around that.

    Args:
        owner: a class, or a module.
        name: of the function.
        wrapper: makes the replacement of what is within it. It is called again when another wrapper comes.

    Raises:
        IncompatibleKerasError: there is no such function, or it is another one than tfdist knows.
    """
    seam = _seams.get((owner, name))
    if seam is None or getattr(owner, name, None) is not seam.standing:
        seam = _seams[owner, name] = _Seam(check(owner, name))
    seam.wrappers.append(wrapper)
    seam.wrappers.sort(key=lambda one: place_of(_function_of(one).__module__))  # keeps the order of equal ones
    seam.standing = functools.reduce(_around, seam.wrappers, seam.original)
    setattr(owner, name, seam.standing)


def standing() -> dict[str, list[str]]:
    """What stands on each replaced function, outer to inner: modules and names of wrappers, by the function's name."""
    return {
        key_of(owner, name): [
            f"{_function_of(one).__module__.removeprefix('tfdist.')}.{_function_of(one).__qualname__}"
            for one in reversed(seam.wrappers)
        ]
        for (owner, name), seam in _seams.items()
    }


def _around(within: Function, wrapper: Wrapper) -> Function:
    return functools.wraps(within)(wrapper(within))


def _function_of(wrapper: Wrapper) -> Any:
    return wrapper.func if isinstance(wrapper, functools.partial) else wrapper
