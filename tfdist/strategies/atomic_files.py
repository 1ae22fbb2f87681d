"""Atomic writing of files: a file appears whole or not at all."""

from __future__ import annotations

import contextlib
import glob
import os
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def written(path: Path) -> Iterator[Path]:
    """Context in which the caller writes a file under a temporary name; the file is renamed at the end.

    Args:
        path: path of the file.

    Yields:
        The temporary path, in the same folder.
    """
    partial = partial_name(path)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def partial_name(path: Path) -> Path:
    """Returns the path that a file has until it is complete."""
    return path.with_name(f".{uuid.uuid4().hex[:8]}.{path.name}")


def remove_partial(path: Path) -> None:
    """Removes partial files left by a process that was killed while it wrote this file."""
    for left in path.parent.glob(f".????????.{glob.escape(path.name)}"):
        left.unlink(missing_ok=True)
