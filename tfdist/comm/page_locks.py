"""Locks of host memory, which a GPU then reads and writes directly, at the speed of its link.

The driver copies other memory through a small buffer of its own, piece by piece.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

import numpy as np

log = logging.getLogger("tfdist")

_SMALLEST = 1 << 18
"""Size in bytes of the smallest array that is worth a lock."""
_FOR_ALL_CONTEXTS = 1
"""Value of the driver's flag ``CU_MEMHOSTREGISTER_PORTABLE``."""


class PageLocks:
    """Locks of this process's memory, made in place for GPUs of NVIDIA once one is known.

    Attributes:
        device: number of the GPU that this process computes on, as CUDA counts; None if it computes on none.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self._kept: list[np.ndarray] = []

    def lock(self, array: np.ndarray) -> bool:
        """Locks the memory of an array, and keeps the array alive.

        If the array were freed, other memory at its address would be taken for it.

        Args:
            array: array of any dtype.

        Returns:
            Whether the memory is locked. If not, it is copied like any other memory.
        """
        if self.device is None or array.nbytes < _SMALLEST:
            return False
        driver = _driver()
        if driver is None:
            return False
        context = ctypes.c_void_p()
        address, size = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)
        status = (
            driver.cuInit(0)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.device)  # TensorFlow's context
            or driver.cuCtxPushCurrent_v2(context)
        )
        if not status:
            status = driver.cuMemHostRegister_v2(address, size, _FOR_ALL_CONTEXTS)
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        if status:
            _say(status)
            return False
        self._kept.append(array)
        return True


@functools.cache
def _driver() -> Any:
    """Returns the library of the driver; None if there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def _say(status: int) -> None:
    log.warning(
        "tfdist: the driver does not lock host memory for the GPU (CUDA error %d): sums are copied more slowly. Raise "
        "`ulimit -l`, or the container's limit of locked memory, if it is too small.",
        status,
    )


page_locks = PageLocks()
"""The page locks of this process."""
