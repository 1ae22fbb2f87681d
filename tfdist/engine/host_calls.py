"""Calls of host functions from graphs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.call_order import in_order
from tfdist.tensors import HOST
from tfdist.thread_values import ThreadValue

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)
"""The value of ``FE_DFL_ENV`` in Linux's C libraries, on the machines below."""
_MACHINES = ("x86_64", "aarch64")
_ENVIRONMENT_BYTES = 64
"""Buffer size in bytes, larger than a ``fenv_t`` of these machines."""


class HostCallError(Exception):
    """A function that is to be compiled calls the host."""

    _keras_call_info_injected = True  # keeps Keras from replacing this error by one with a layer's arguments


_refuses = ThreadValue(False)
"""Whether the current thread traces a function that must not call the host."""


def refused() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which calls of the host raise `HostCallError`."""
    return _refuses.set_to(True)


def check(what: str) -> None:
    """Checks that calls of the host are allowed here.

    Args:
        what: name of the call, for the error.

    Raises:
        HostCallError: this thread is inside of `refused`.
    """
    if _refuses.value:
        raise HostCallError(f"it cannot compile calls of host functions, such as {what}")


def host_call(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], dtypes: tf.DType | Sequence[tf.DType], name: str
) -> Any:
    """Calls `tf.py_function` on the host, where the function computes with subnormal numbers, as Python's threads do.

    TensorFlow's threads flush subnormal numbers to zero. If each rank computes the same values by itself, its results
    must not depend on which kind of thread computes them; otherwise ranks would end with different bits.

    `tf.py_function` has a kernel for GPUs, which TensorFlow chooses if the surrounding graph is on a GPU. Its function
    would get tensors in the GPU's memory, and copy them one by one while it holds Python's lock. The function's own
    operations are on the host, too: TensorFlow would put them on a GPU, and wait for the copies while it holds the lock
    that the thread which ends them needs.

    Calls of a graph run in the order in which they are traced.

    Args:
        function: function of eager tensors; returns what `tf.py_function` accepts.
        inputs: arguments of the function.
        dtypes: dtypes of the function's results.
        name: name of the operation.

    Raises:
        HostCallError: this thread is inside of `refused`.
    """
    check(name)

    @functools.wraps(function)
    def on_host(*tensors: tf.Tensor) -> Any:
        with GradualUnderflow(), tf.device(HOST):
            return function(*tensors[: len(inputs)])

    with in_order() as order, tf.device(HOST):
        return tf.py_function(on_host, [*inputs, *order], dtypes, name=name)


class GradualUnderflow:
    """Context in which this thread computes with subnormal numbers.

    It has an effect only under Linux on x86-64 and 64-bit Arm.
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
    """Returns the C library, if its floating-point environment is known to work as above; otherwise None."""
    if platform.system() != "Linux" or platform.machine() not in _MACHINES:
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "fesetenv") else None


_LIBRARY = _library()
