"""Private members of `keras.callbacks.BackupAndRestore`, used here only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def methods_of(callback: Any) -> tuple[Callable[[], None], Callable[[], None]]:
    """What reads a backup, and what writes one."""
    return callback._load_model, callback._save_model


def replace_methods(callback: Any, load: Callable[[], None], save: Callable[[], None]) -> None:
    """Gives a callback others."""
    callback._load_model, callback._save_model = load, save


def paths_of(callback: Any) -> tuple[str, str]:
    """Of the weights, and of the epoch and batch."""
    return callback._weights_path, callback._training_metadata_path


@contextlib.contextmanager
def with_paths(callback: Any, weights: str, metadata: str) -> Iterator[None]:
    """Context in which a callback reads other files."""
    before = paths_of(callback)
    callback._weights_path, callback._training_metadata_path = weights, metadata
    try:
        yield
    finally:
        callback._weights_path, callback._training_metadata_path = before


def position_of(callback: Any) -> dict[str, int]:
    """The epoch that training would go on with, and the batch of it, as Keras writes them."""
    return {"epoch": callback._current_epoch, "batch": callback._last_batch_seen}
