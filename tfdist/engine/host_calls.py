"""Calls of host functions from graphs."""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

HOST = "/device:CPU:0"
"""The device whose tensors are in the memory that host functions read and write."""

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)
"""``FE_DFL_ENV`` of the C libraries of Linux, on the machines below."""
_MACHINES = ("x86_64", "aarch64")
_ENVIRONMENT_BYTES = 64
"""More than a ``fenv_t`` of these machines has."""


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
    """

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
