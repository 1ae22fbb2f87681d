"""Memory of the temporary arrays that encoding allocates and frees in every step."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping

# From malloc.h; the sizes are the maxima of glibc's own adjustment.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LIMITS = {_M_TRIM_THRESHOLD: 64 << 20, _M_MMAP_THRESHOLD: 32 << 20}


def keep_freed() -> None:
    """Makes glibc keep freed memory for reuse.

    glibc does so by default: it adjusts its limits to programs that free large blocks, until one of the limits is set.
    TensorFlow's GeneratorDataset, which the iterators of `tf.distribute` use, sets one when the first is made. From
    then on large blocks come from the kernel, page by page, and encoding takes up to twice as long. This function sets
    the limits that glibc would have adjusted to. Call it in every step, because TensorFlow may set its own later.
    Limits set by the user take precedence.
    """
    if (library := _library()) is not None:
        for limit, nbytes in _LIMITS.items():
            library.mallopt(limit, nbytes)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if is_left_to_us(platform.libc_ver()[0], os.environ) else None


def is_left_to_us(library: str, environment: Mapping[str, str]) -> bool:
    """Returns whether the C library is glibc, and the user has not configured its allocator.

    Args:
        library: the name of the C library.
        environment: this process's environment variables.
    """
    configured = any(name.startswith("MALLOC_") for name in environment)
    return library == "glibc" and not configured and "glibc.malloc" not in environment.get("GLIBC_TUNABLES", "")
