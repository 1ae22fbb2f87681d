"""Private members of `keras.callbacks.BackupAndRestore`, used here only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def methods_of(callback: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """Returns the methods that read and write a backup."""
    return callback._load_model, callback._save_model


def replace_methods(callback: Any, load: Callable[[], object], save: Callable[[], None]) -> None:
    """Replaces the methods that read and write a backup."""
    callback._load_model, callback._save_model = load, save


def paths_of(callback: Any) -> tuple[str, str]:
    """Returns the paths of the weights file, and of the file with the epoch and batch."""
    return callback._weights_path, callback._training_metadata_path


@contextlib.contextmanager
def with_paths(callback: Any, weights: str, metadata: str) -> Iterator[None]:
    """Context in which a callback reads the given files in place of its own."""
    before = paths_of(callback)
    callback._weights_path, callback._training_metadata_path = weights, metadata
    try:
        yield
    finally:
        callback._weights_path, callback._training_metadata_path = before


def position_of(callback: Any) -> dict[str, int]:
    """Returns the epoch and the batch that training would resume with, as Keras writes them."""
    return {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
