"""Calls of host functions from graphs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)
"""``FE_DFL_ENV`` of the C libraries of Linux, on the machines below."""
_MACHINES = ("x86_64", "aarch64")
_ENVIRONMENT_BYTES = 64
"""More than a ``fenv_t`` of these machines has."""


def host_call(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: tf.DType | Sequence[tf.DType], name: str
) -> Any:
    """Like `tf.py_function`; the function computes with subnormal numbers, as in any thread that Python starts.

    TensorFlow's threads take subnormal numbers for zero. What ranks compute alike, each for itself, must not depend on
    which kind of thread happens to compute it, or they end with different bits.

    Args:
        function: called with eager tensors; returns what `tf.py_function` takes.
        inputs: its arguments.
        dtypes: of its results.
        name: of the operation.
    """

    @functools.wraps(function)
    def on_host(*tensors: tf.Tensor) -> Any:
        with gradual_underflow():
            return function(*tensors)

    return tf.py_function(on_host, list(inputs), dtypes, name=name)


@contextlib.contextmanager
def gradual_underflow() -> Iterator[None]:
    """Lets this thread compute with subnormal numbers; takes about a microsecond.

    Other systems and machines than Linux on x86-64 and 64-bit Arm are left as they are.
    """
    library = _library()
    if library is None:
        yield
        return
    before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
    library.fegetenv(before)
    library.fesetenv(_DEFAULT_ENVIRONMENT)
    try:
        yield
    finally:
        library.fesetenv(before)


@functools.cache
def _library() -> Any:
    """The C library, if its functions for the floating-point environment are known to work as above."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "fesetenv") else None
