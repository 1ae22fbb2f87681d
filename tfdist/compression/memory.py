"""The memory of the temporaries that encoding takes and frees in every step."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Mapping

# Of malloc.h; the sizes are the most that glibc's own adjustment comes to.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LIMITS = {_M_TRIM_THRESHOLD: 64 << 20, _M_MMAP_THRESHOLD: 32 << 20}


def keep_freed() -> None:
    """Lets the C library keep what is freed, and hand it out again, as it does by itself.

    glibc adjusts to programs that free large blocks, until somebody sets one of its limits. TensorFlow's
    GeneratorDataset, on which the iterators of `tf.distribute` stand, does, when the first one is made. From then on
    large blocks are new from the kernel, page by page, and encoding takes up to twice its time. This sets the limits
    that glibc would have adjusted to, again and again, as TensorFlow's may follow. What users have set counts.
    """
    if (library := _library()) is not None:
        for limit, nbytes in _LIMITS.items():
            library.mallopt(limit, nbytes)


@functools.cache
def _library() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if is_left_to_us(platform.libc_ver()[0], os.environ) else None


def is_left_to_us(library: str, environment: Mapping[str, str]) -> bool:
    """Whether this is glibc, and nobody has told it what to do.

    Args:
        library: name of the C library.
        environment: variables of this process.
    """
    told = any(name.startswith("MALLOC_") for name in environment)
    return library == "glibc" and not told and "glibc.malloc" not in environment.get("GLIBC_TUNABLES", "")
