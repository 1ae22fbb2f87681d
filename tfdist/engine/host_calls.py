"""Calls of host functions from graphs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

HOST = "/device:CPU:0"
"""The device whose tensors are in the memory that host functions read and write."""

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)
"""``FE_DFL_ENV`` of the C libraries of Linux, on the machines below."""
_MACHINES = ("x86_64", "aarch64")
_ENVIRONMENT_BYTES = 64
"""More than a ``fenv_t`` of these machines has."""


class RefusedError(Exception):
    """A function that is to be compiled calls the host."""

    _keras_call_info_injected = True  # Keras would raise another error, which tells a layer's arguments


class _Refusing(threading.local):
    """Whether this thread traces such a function."""

    on = False


_refusing = _Refusing()


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Context in which calls of the host raise `RefusedError`."""
    before, _refusing.on = _refusing.on, True
    try:
        yield
    finally:
        _refusing.on = before


def check(what: str) -> None:
    """Checks that what calls the host may.

    Args:
        what: is about to be done.

    Raises:
        RefusedError: inside of `refused`.
    """
    if _refusing.on:
        raise RefusedError(f"it compiles no calls of the host, such as {what}")


def host_call(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: tf.DType | Sequence[tf.DType], name: str
) -> Any:
    """Like `tf.py_function`, on the host; the function computes with subnormal numbers, as Python's threads do.

    TensorFlow's threads take subnormal numbers for zero. What ranks compute alike, each for itself, must not depend on
    which kind of thread happens to compute it, or they end with different bits.

    `tf.py_function` has a kernel for GPUs, which TensorFlow chooses where the graph around the call is on one; its
    function would get tensors in the GPU's memory, and copy them one by one while it holds Python's lock.

    Args:
        function: called with eager tensors; returns what `tf.py_function` takes.
        inputs: its arguments.
        dtypes: of its results.
        name: of the operation.

    Raises:
        RefusedError: inside of `refused`.
    """
    check(name)

    @functools.wraps(function)
    def on_host(*tensors: tf.Tensor) -> Any:
        with GradualUnderflow():
            return function(*tensors)

    with tf.device(HOST):
        return tf.py_function(on_host, list(inputs), dtypes, name=name)


class GradualUnderflow:
    """Lets this thread compute with subnormal numbers.

    Other systems and machines than Linux on x86-64 and 64-bit Arm are left as they are.
    """

    def __enter__(self) -> None:
        self._before = ctypes.create_string_buffer(_ENVIRONMENT_BYTES)
        if _LIBRARY is not None:
            _LIBRARY.fegetenv(self._before)
            _LIBRARY.fesetenv(_DEFAULT_ENVIRONMENT)

    def __exit__(self, *error: object) -> None:
        if _LIBRARY is not None:
            _LIBRARY.fesetenv(self._before)


def _library() -> Any:
    """The C library, if its functions for the floating-point environment are known to work as above."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "fesetenv") else None


_LIBRARY = _library()
