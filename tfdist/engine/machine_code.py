"""Finds and loads the library of tfdist's own operations, which is there if a C compiler was at the installation."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import sys
import zlib
from pathlib import Path
from typing import Any, NamedTuple

log = logging.getLogger("tfdist")

VARIABLE = "TFDIST_MACHINE_CODE"
"""Environment variable that is 0 for a process that does not use the library."""


class Library(NamedTuple):
    """The loaded library.

    Attributes:
        operations: TensorFlow's operations, as Python functions.
        functions: the library's own functions.
    """

    operations: Any
    functions: ctypes.CDLL


def path() -> str | None:
    """Returns the path of the library; None if this process does without."""
    if os.environ.get(VARIABLE) == "0":
        return None
    built = Path(__file__).with_name("shared_sums.library.so")
    return str(built) if built.exists() else None


def is_usable() -> bool:
    """Returns whether this process can use the library; warns if it is there, and does not fit or cannot be loaded.

    A program that has not imported TensorFlow does not sum tensors, and need not wait for the import.
    """
    where = path()
    if where is None:
        return False
    try:
        if "tensorflow" in sys.modules:
            load()
        else:
            _check_source(Path(where))
    except RuntimeError as error:
        log.warning("%s", error)
        return False
    return True


@functools.cache
def load() -> Library:
    """Loads the library, which must be there.

    Raises:
        RuntimeError: TensorFlow or the system cannot load it, or it was built from another version of its source.
    """
    import tensorflow as tf  # `path` is for programs that start without it

    where = path()
    assert where is not None
    _check_source(Path(where))
    framework = Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"
    try:
        if framework.exists():  # some versions of TensorFlow load it without making its symbols known to others
            ctypes.CDLL(str(framework), ctypes.RTLD_GLOBAL)
        return Library(tf.load_op_library(where), ctypes.CDLL(where))
    except (OSError, tf.errors.OpError) as error:
        raise _unusable(where, str(error)) from error


def _check_source(library: Path) -> None:
    """Compares the library with its source, where that is beside it, as in a clone that is installed to be edited.

    Raises:
        RuntimeError: the library was built from another version of the source.
    """
    source = library.with_name("shared_sums.c")
    if source.exists() and b"built from %08x\0" % zlib.crc32(source.read_bytes()) not in library.read_bytes():
        raise _unusable(str(library), f"it was not built from the {source.name} beside it")


def _unusable(library: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"tfdist cannot load {library}, so all processes sum in Python, which takes longer: {why}. Install tfdist "
        f"again, or set {VARIABLE}=0 to do without."
    )
