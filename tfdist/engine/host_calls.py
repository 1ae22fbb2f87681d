"""Calls of host functions, from graphs and eagerly."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from tfdist.engine.call_order import in_order
from tfdist.tensors import HOST, to_array, to_tensor
from tfdist.thread_values import ThreadValue

_DEFAULT_ENVIRONMENT = ctypes.c_void_p(-1)
"""The value of ``FE_DFL_ENV`` in Linux's C libraries, on the machines below."""
_MACHINES = ("x86_64", "aarch64")
_ENVIRONMENT_BYTES = 64
"""Buffer size in bytes, larger than a ``fenv_t`` of these machines."""


OPERATIONS = ("PyFunc", "EagerPyFunc")
"""Types of the operations of host calls in graphs."""

_SMALL_BYTES = 1 << 20
"""Bytes of arguments and results, all of known shapes, up to which `tf.numpy_function` is used. It takes less time than
`tf.py_function`, but keeps the memory of results until the next call."""


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


Result: TypeAlias = "tf.DType | tf.TensorSpec"
"""The dtype of a result of a host call, or its dtype and shape."""


@tf.autograph.experimental.do_not_convert  # AutoGraph would convert what runs in each call
def host_call(
    function: Callable[..., Any], inputs: Sequence[tf.Tensor], results: Result | Sequence[Result], name: str
) -> Any:
    """Calls a function of arrays on the host, where it computes with subnormal numbers, as Python's threads do.

    TensorFlow's threads flush subnormal numbers to zero. If each rank computes the same values by itself, its results
    must not depend on which kind of thread computes them; otherwise ranks would end with different bits.

    `tf.py_function` has a kernel for GPUs, which TensorFlow chooses if the surrounding graph is on a GPU. Its function
    would get tensors in the GPU's memory, and copy them one by one while it holds Python's lock. The function's own
    operations are on the host, too: TensorFlow would put them on a GPU, and wait for the copies while it holds the lock
    that the thread which ends them needs.

    Calls of a graph run in the order in which they are traced. An eager call raises the function's own errors.

    Args:
        function: function of read-only arrays, which may share the memory of tensors. Returns an array, a list of them,
            or None for no results. Nothing may write to a result later, unless the function returned it read-only.
        inputs: arguments of the function.
        results: what the function returns; a call is quicker if their shapes are known.
        name: name of the operation.

    Raises:
        HostCallError: this thread is inside of `refused`.
    """
    check(name)
    if tf.executing_eagerly():
        with GradualUnderflow(), tf.device(HOST):
            return _each(to_tensor, function(*map(_argument, inputs)))
    specs = list(results) if isinstance(results, Sequence) else [results]
    is_small = _are_small(inputs, specs)
    call = tf.numpy_function if is_small else tf.py_function
    from_function: Callable[[np.ndarray], Any] = _lasting if is_small else to_tensor

    @functools.wraps(function)
    def on_host(*given: Any) -> Any:
        _of_thread.keep()
        with GradualUnderflow(), tf.device(HOST):
            return _each(from_function, function(*map(_argument, given[: len(inputs)])))

    dtypes = [spec.dtype if isinstance(spec, tf.TensorSpec) else spec for spec in specs]
    with in_order() as order, tf.device(HOST):
        returned = call(on_host, [*inputs, *order], dtypes, name=name)
    for tensor, spec in zip(returned if specs else [], specs, strict=True):
        if isinstance(spec, tf.TensorSpec):
            tensor.set_shape(spec.shape)
    return returned if isinstance(results, Sequence) else returned[0]


def _are_small(inputs: Sequence[tf.Tensor], specs: Sequence[Result]) -> bool:
    """Returns whether all arguments and results are known to be small."""
    every = [*inputs, *specs]
    if any(isinstance(each, tf.DType) or not each.shape.is_fully_defined() for each in every):
        return False
    return sum(each.dtype.size * each.shape.num_elements() for each in every) <= _SMALL_BYTES


def _argument(given: Any) -> np.ndarray:
    """Returns an argument as an array: `tf.numpy_function` passes a scalar as one of NumPy's, or as bytes."""
    array = np.array(given, object) if isinstance(given, bytes) else to_array(given).view()  # it may be the program's
    array.flags.writeable = False
    return array


def _lasting(array: np.ndarray) -> np.ndarray:
    """Returns an array whose memory a tensor may have; read-only memory, as of a message, may get other contents."""
    return array if array.flags.writeable else array.copy()


def _each(convert: Callable[[np.ndarray], Any], results: Any) -> Any:
    """Converts the result of a host function, or each of them."""
    if results is None:
        return []
    if isinstance(results, (list, tuple)):
        return [convert(np.asarray(result)) for result in results]
    return convert(np.asarray(results))


class _ThreadState(threading.local):
    """Python's state of a thread of TensorFlow, kept between calls.

    Python makes it anew for each call from a thread that it has not started, with all that is kept for a thread, and
    deletes it afterwards: a third of the time of a call.
    """

    _is_kept = False

    def keep(self) -> None:
        """Keeps the state of the calling thread, until the process ends."""
        if not self._is_kept:
            self._is_kept = True
            ctypes.pythonapi.PyGILState_Ensure()  # without the release that would delete it


_of_thread = _ThreadState()


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
