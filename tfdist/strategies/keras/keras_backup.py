"""`keras.callbacks.BackupAndRestore` on several processes: the chief writes and reads, and a backup is atomic.

Keras writes the weights and then the epoch, in two files. A process killed between them would train an epoch twice.
Here the epoch is stored in the weights file, which is written under a temporary name and then renamed. The previous
backup is kept, in case the latest one is damaged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import tensorflow as tf

from tfdist.private import backups
from tfdist.private.models import begin_at, initial_epoch
from tfdist.strategies import atomic_files, keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras import keras_accumulation, keras_saving
from tfdist.strategies.keras.keras_variables import broadcast_state
from tfdist.strategies.server_abilities import UpdatesOnServers

log = logging.getLogger("tfdist")

_METADATA = "training_metadata"


def install() -> None:
    """Installs the hook."""
    keras_hooks.add(ChiefBackups)


class ChiefBackups(keras_hooks.ModelHooks[DataParallel]):
    """Hooks that have the chief write backups, and restore them on all ranks."""

    ability = DataParallel

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Changes the user's `keras.callbacks.BackupAndRestore`, in place."""
        for callback in given:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                share(callback, self.extended)
        return given


def on_servers(given: list[Any], extended: UpdatesOnServers) -> list[Any]:
    """Returns the callbacks of a task that trains with parameter servers.

    The chief backs up the model, and each other worker the number of its epoch.

    Args:
        given: the user's callbacks.
        extended: the strategy's `extended`.

    Raises:
        ValueError: a callback has been used under a strategy without parameter servers.
    """
    return [
        _of_task(callback, extended.worker) if isinstance(callback, keras.callbacks.BackupAndRestore) else callback
        for callback in given
    ]


def _of_task(callback: Any, worker: int) -> Any:
    known = getattr(callback, "_tfdist_shared", None)
    if isinstance(known, _Shared):
        raise _other_kind("under parameter servers", "without them")
    if worker:
        return WorkerEpochBackup(callback, worker)
    if known is None:
        callback._tfdist_shared = files = BackupFiles(callback, *backups.methods_of(callback))
        backups.replace_methods(callback, files.load, files.save)
        callback.on_train_end = files.remove
    return callback


def share(callback: Any, extended: DataParallel) -> None:
    """Makes a callback restore all ranks from the chief's backup.

    Args:
        callback: a `keras.callbacks.BackupAndRestore`.
        extended: the strategy's `extended`.

    Raises:
        ValueError: the callback has been used under parameter servers.
    """
    known = getattr(callback, "_tfdist_shared", None)
    if known is None:
        callback._tfdist_shared = _Shared(callback, extended)
    elif isinstance(known, _Shared):
        known.extended = extended
    else:
        raise _other_kind("without parameter servers", "under them")


def _other_kind(now: str, before: str) -> ValueError:
    return ValueError(
        f"expected a BackupAndRestore that has been used only {now}; got one that has been used {before}: make another "
        "one for this strategy"
    )


class _Shared:
    """Replacements for the callback's methods, on one rank.

    Attributes:
        extended: `extended` of the strategy of the model that is trained.
    """

    def __init__(self, callback: Any, extended: DataParallel) -> None:
        self._callback = callback
        self.extended = extended
        self._files = BackupFiles(callback, *backups.methods_of(callback))
        self._end = callback.on_train_end
        backups.replace_methods(callback, self.load, self.save)
        callback.on_train_end = self.end

    @property
    def _beside(self) -> str:
        return os.path.join(self._callback.backup_dir, "residuals")

    def load(self) -> None:
        """Restores the chief's backup on all ranks, if there is one."""
        callback, extended = self._callback, self.extended
        model = callback.model
        optimizer = model.optimizer
        if model.built and optimizer is not None and not optimizer.built:
            # For some models `fit` builds the optimizer only in the first step. All ranks create its variables here:
            # the chief must not do so alone, and runs with and without a backup must create the same ones.
            with model.distribute_strategy.scope():
                optimizer.build(model.trainable_variables)
        failure = None
        try:
            with extended.reading_for_all():
                extended.run_on_writer(model, self._files.load)
        except Exception as error:
            if not extended.is_writer:
                raise
            failure = error
        status = tf.constant([0 if failure is None else 1, initial_epoch(model)], tf.int64)
        status = extended.all_processes.broadcast_once(status, "the state of the backup", "int64 (2,)").numpy()
        if failure is not None:
            raise RuntimeError(f"the backup in {callback.backup_dir} cannot be read: {failure}") from failure
        if status[0]:
            raise RuntimeError(
                f"the chief could not read the backup in {callback.backup_dir}; see the error of rank "
                f"{extended.all_processes.members[0]} for the cause"
            )
        begin_at(model, int(status[1]))
        broadcast_state(model, extended)
        keras_accumulation.leave_to_writer(model, extended)
        if status[1]:
            keras_saving.restore_training_state(model, extended, self._beside)

    def save(self) -> None:
        """Writes a backup: the chief writes the model, and every rank its residuals."""
        saves = self.extended.is_writer or keras_saving.compressor_of(self.extended) is not None
        if saves and "://" not in self._beside:
            Path(self._beside).parent.mkdir(parents=True, exist_ok=True)
        keras_accumulation.gather(self._callback.model, self.extended)  # within an epoch, too
        keras_saving.save_training_state(self._callback.model, self.extended, self._beside)
        self.extended.run_on_writer(self._callback.model, self._files.save)

    def end(self, logs: Any = None) -> None:
        """Removes the backup, unless it is to be kept."""
        compressor = keras_saving.compressor_of(self.extended)
        if compressor is not None and self._callback.delete_checkpoint:
            compressor.file(self._beside).unlink(missing_ok=True)
            self.extended.all_processes.barrier()  # the chief then removes the directory, which may be a shared one
        if self.extended.is_writer:
            self._end(logs)


class WorkerEpochBackup(keras.callbacks.Callback):
    """A callback by which a restarted worker of parameter servers, which hold the weights, resumes at its next epoch.

    Args:
        callback: the worker's `keras.callbacks.BackupAndRestore`, in whose folder the chief saves the model.
        worker: number of the worker.
    """

    def __init__(self, callback: Any, worker: int) -> None:
        super().__init__()
        self._deletes = callback.delete_checkpoint
        self._folder = callback.backup_dir
        self._path = os.path.join(callback.backup_dir, f"epoch_of_worker_{worker}.json")

    def on_train_begin(self, logs: Any = None) -> None:
        """Has `fit` begin after the last epoch that this worker has ended."""
        if tf.io.gfile.exists(self._path):
            with tf.io.gfile.GFile(self._path) as file:
                begin_at(self.model, int(json.loads(file.read())["epoch"]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes the number of the next epoch."""
        partial = f"{self._path}.partial"
        tf.io.gfile.makedirs(self._folder)
        with contextlib.suppress(tf.errors.NotFoundError):  # the chief has ended and removes the folder
            with tf.io.gfile.GFile(partial, "w") as file:
                file.write(json.dumps({"epoch": epoch + 1}))
            tf.io.gfile.rename(partial, self._path, overwrite=True)

    def on_train_end(self, logs: Any = None) -> None:
        """Removes this worker's file, unless backups are to be kept."""
        if self._deletes:
            with contextlib.suppress(tf.errors.NotFoundError):  # the chief removes the whole folder
                tf.io.gfile.remove(self._path)


class BackupFiles:
    """A backup's files, on the process that writes them.

    Args:
        callback: a `keras.callbacks.BackupAndRestore`.
        load: Keras's method of the callback that reads a backup.
        save: Keras's method of the callback that writes a backup.
    """

    def __init__(self, callback: Any, load: Callable[[], None], save: Callable[[], None]) -> None:
        self._callback = callback
        self._keras_load = load
        self._keras_save = save
        self._is_remote = "://" in str(callback.backup_dir)
        self._latest, self._metadata = map(Path, backups.paths_of(callback))
        self._previous = self._latest.with_name("previous.weights.h5")

    def save(self) -> None:
        """Writes weights and epoch to one file, and replaces the previous file by renaming."""
        if self._is_remote:
            self._keras_save()
            return
        self._latest.parent.mkdir(parents=True, exist_ok=True)
        metadata = json.dumps(backups.position_of(self._callback))
        with atomic_files.written(self._latest) as partial:
            with keras_saving.without_others():
                self._callback.model.save_weights(partial)
            with h5py.File(partial, "a") as file:
                file.attrs[_METADATA] = metadata
            _flush(partial)
            if self._latest.exists():
                os.replace(self._latest, self._previous)
        with atomic_files.written(self._metadata) as partial:  # Keras's own file, to restore without tfdist
            partial.write_text(metadata)

    def load(self) -> bool:
        """Restores the latest backup, or the previous one if the latest is damaged or missing.

        Returns:
            Whether there was a backup.

        Raises:
            Exception: any error of Keras or the file system, if there are backups and none can be read.
        """
        if self._is_remote:
            is_there = any(map(tf.io.gfile.exists, backups.paths_of(self._callback)))
            self._keras_load()
            return is_there
        for file in (self._latest, self._metadata):
            atomic_files.remove_partial(file)
        failure: Exception | None = None
        for file in (self._latest, self._previous):
            if not file.exists():
                continue
            try:
                self._load(file)
            except Exception as error:
                then = "trying the previous one" if file is self._latest else "there is no other"
                log.warning("tfdist: the backup %s cannot be read (%s); %s", file, error, then)
                failure = failure or error
            else:
                return True
        if failure is not None:
            raise failure
        self._load(self._latest)  # Keras handles a missing file
        return False

    def remove(self, logs: Any = None) -> None:
        """Removes the folder, unless backups are to be kept; tolerates workers that still write to it."""
        if self._callback.delete_checkpoint and tf.io.gfile.exists(self._callback.backup_dir):
            with contextlib.suppress(tf.errors.OpError):
                tf.io.gfile.rmtree(self._callback.backup_dir)

    def _load(self, file: Path) -> None:
        epoch = _epoch(file, self._metadata) if file.exists() else None
        with backups.with_paths(self._callback, str(file), f"{self._metadata}.none"):
            self._keras_load()
        if epoch is not None:
            begin_at(self._callback.model, epoch)


def _epoch(file: Path, metadata: Path) -> int:
    """Returns the epoch that training resumes with from a backup."""
    with h5py.File(file, "r") as weights:
        text = weights.attrs.get(_METADATA)
    if text is None:  # the file was written by Keras without tfdist
        text = metadata.read_text() if metadata.exists() else '{"epoch": 0}'
    return int(json.loads(text)["epoch"])


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
