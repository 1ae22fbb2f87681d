"""`keras.callbacks.BackupAndRestore` on several processes: the chief writes and reads, and a backup is whole.

Keras writes the weights and then the epoch, in two files. A process that is killed between them would train an epoch
twice. Here the epoch stands in the file of the weights, which appears under its name by one renaming; the backup before
it is kept, for when the file turns out to be damaged.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import h5py
import tensorflow as tf

from tfdist.strategies import keras_saving
from tfdist.strategies.abilities import LoadsForAll
from tfdist.strategies.keras_variables import broadcast_state

log = logging.getLogger("tfdist")

_METADATA = "training_metadata"


def share(callback: Any, extended: LoadsForAll) -> None:
    """Changes a callback such that all ranks go on from the chief's backup.

    Args:
        callback: a `keras.callbacks.BackupAndRestore`.
        extended: of the strategy.
    """
    if not hasattr(callback, "_tfdist_shared"):
        callback._tfdist_shared = _Shared(callback, extended)


class _Shared:
    """What the callback's methods become on one rank."""

    def __init__(self, callback: Any, extended: LoadsForAll) -> None:
        self._callback = callback
        self._extended = extended
        self._files = _Files(callback)
        self._end = callback.on_train_end
        callback._load_model = self.load
        callback._save_model = self.save
        callback.on_train_end = self.end

    @property
    def _residuals(self) -> Path:
        return Path(self._callback.backup_dir) / "residuals"

    def load(self) -> None:
        """Restores the chief's backup on all ranks, if there is one."""
        callback, extended = self._callback, self._extended
        model, chief = callback.model, extended.group.is_writer
        failure = None
        if chief:
            try:
                with extended.local_only(), extended.reading_for_all():
                    self._files.load()
            except Exception as error:
                failure = error
        status = tf.constant([0 if failure is None else 1, model._initial_epoch or 0], tf.int64)
        status = extended.exchange.broadcast_once(status, "what the backup holds", "int64 (2,)").numpy()
        if failure is not None:
            raise RuntimeError(f"the backup in {callback.backup_dir} cannot be read: {failure}") from failure
        if status[0]:
            raise RuntimeError(f"the chief could not read the backup in {callback.backup_dir}; its own error says why")
        model._initial_epoch = int(status[1])
        if status[1] and not chief and model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        broadcast_state(model, extended)
        if status[1]:
            keras_saving.restore_compression(extended, self._residuals)

    def save(self) -> None:
        """Writes a backup: the chief's of the model, every rank's of its residuals."""
        compressor = keras_saving.compressor_of(self._extended)
        if compressor is not None:
            self._residuals.parent.mkdir(parents=True, exist_ok=True)
            compressor.save(self._residuals)
        if self._extended.group.is_writer:
            with self._extended.local_only():
                self._files.save()

    def end(self, logs: Any = None) -> None:
        """Removes the backup, where it is not to be kept."""
        compressor = keras_saving.compressor_of(self._extended)
        if compressor is not None and self._callback.delete_checkpoint:
            compressor.file(self._residuals).unlink(missing_ok=True)
            self._extended.exchange.barrier()  # the chief removes the folder, which may be the same one
        if self._extended.group.is_writer:
            self._end(logs)


class _Files:
    """A backup's files, on the chief."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._keras_load = callback._load_model
        self._keras_save = callback._save_model
        self._is_remote = "://" in str(callback.backup_dir)
        self._latest = Path(callback._weights_path)
        self._previous = self._latest.with_name("previous.weights.h5")
        self._metadata = Path(callback._training_metadata_path)

    def save(self) -> None:
        """Writes weights and epoch, and puts them in the place of those before by one renaming."""
        if self._is_remote:
            self._keras_save()
            return
        self._latest.parent.mkdir(parents=True, exist_ok=True)
        metadata = json.dumps({"epoch": self._callback._current_epoch, "batch": self._callback._last_batch_seen})
        partial = keras_saving.partial_name(self._latest)
        self._callback.model.save_weights(partial)
        with h5py.File(partial, "a") as file:
            file.attrs[_METADATA] = metadata
        _flush(partial)
        if self._latest.exists():
            os.replace(self._latest, self._previous)
        os.replace(partial, self._latest)
        # For a later start without tfdist.
        partial = keras_saving.partial_name(self._metadata)
        partial.write_text(metadata)
        os.replace(partial, self._metadata)

    def load(self) -> None:
        """Restores the latest backup, or the one before it where that is damaged or missing.

        Raises:
            Exception: whatever Keras or the file system raises if there are backups and none can be read.
        """
        if self._is_remote:
            self._keras_load()
            return
        for file in (self._latest, self._metadata):
            keras_saving.remove_partial(file)
        failure: Exception | None = None
        for file in (self._latest, self._previous):
            if not file.exists():
                continue
            try:
                self._load(file)
            except Exception as error:
                log.warning("tfdist: the backup %s cannot be read (%s); trying the one before it", file, error)
                failure = failure or error
            else:
                return
        if failure is not None:
            raise failure
        self._load(self._latest)  # Keras says what else there is to say

    def _load(self, file: Path) -> None:
        epoch = _epoch(file, self._metadata) if file.exists() else None
        paths = self._callback._weights_path, self._callback._training_metadata_path
        self._callback._weights_path, self._callback._training_metadata_path = str(file), f"{self._metadata}.none"
        try:
            self._keras_load()
        finally:
            self._callback._weights_path, self._callback._training_metadata_path = paths
        if epoch is not None:
            self._callback.model._initial_epoch = epoch


def _epoch(file: Path, metadata: Path) -> int:
    """The epoch that a backup goes on with."""
    with h5py.File(file, "r") as weights:
        text = weights.attrs.get(_METADATA)
    if text is None:  # Keras has written it
        text = metadata.read_text() if metadata.exists() else '{"epoch": 0}'
    return int(json.loads(text)["epoch"])


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
