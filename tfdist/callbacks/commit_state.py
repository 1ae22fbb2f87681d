"""A callback that continues training after a restart of all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.callbacks.processes import processes_of
from tfdist.engine.exchange import Exchange
from tfdist.optimizers.keras_optimizers import gradients_of
from tfdist.private import backups
from tfdist.private.models import begin_at, initial_epoch
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras import keras_backup, keras_saving


class CommitState(keras.callbacks.BackupAndRestore):
    """`keras.callbacks.BackupAndRestore` for `tfdist.DistributedOptimizer`: the first process writes and reads for all.

    A restarted job continues with the epoch after the last one that was committed, with its weights and the optimizer's
    variables on every process; the number of processes may change. Each process writes its residuals of gradient
    compression, which are used if all processes find theirs. Files are replaced as a whole, and the previous one is
    kept. Under a strategy this is Keras's own callback, for which the strategy does the same.

    Args:
        backup_dir: directory on the machine of the first process; with compression, on the machines of all processes.
        save_freq: ``"epoch"``, or a number of batches. Training continues with the first batch of an epoch.
        delete_checkpoint: whether the files are removed when training has ended.
    """

    def __init__(self, backup_dir: Any, save_freq: str | int = "epoch", delete_checkpoint: bool = True) -> None:
        super().__init__(str(backup_dir), save_freq, delete_checkpoint=delete_checkpoint)
        self._files = keras_backup.BackupFiles(self, *backups.methods_of(self))

    @property
    def _is_of_a_strategy(self) -> bool:
        return current_strategy.of_model(self.model, DataParallel) is not None

    @property
    def _residuals(self) -> Path:
        return Path(self.backup_dir) / "residuals"

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the committed state on all processes.

        Raises:
            RuntimeError: the first process cannot read the committed files.
        """
        if self._is_of_a_strategy:
            super().on_train_begin(logs)
            return
        group = processes_of(self.model)
        # The first process would build its optimizer when it reads files; all processes need to.
        if self.model.built and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        failure, is_restored = None, False
        if group.is_writer:
            try:
                is_restored = self._files.load()
            except Exception as error:
                failure = error
        exchange = Exchange(group)
        status = tf.constant([failure is not None, is_restored, initial_epoch(self.model)], tf.int64)
        failed, is_restored, epoch = exchange.broadcast(status).numpy().tolist()
        if failed:
            cause = f": {failure}" if failure else f"; see the error of rank {group.members[0]}"
            raise RuntimeError(f"the state committed in {self.backup_dir} cannot be read{cause}") from failure
        begin_at(self.model, epoch)
        if is_restored:  # also in epoch 0, of which some batches were trained
            for variable in [*self.model.variables, *self.model.optimizer.variables]:
                variable.assign(exchange.broadcast(tf.convert_to_tensor(variable.value)))
            gradients = gradients_of(self.model.optimizer)
            if gradients is not None and gradients.compressor is not None:
                keras_saving.restore_residuals(gradients.compressor, exchange, group, self._residuals, self.model)

    def _save_model(self) -> None:
        if self._is_of_a_strategy:
            super()._save_model()
            return
        gradients = gradients_of(self.model.optimizer)
        if gradients is not None and gradients.compressor is not None:
            self._residuals.parent.mkdir(parents=True, exist_ok=True)
            gradients.compressor.save(self._residuals, keras_saving.weights_of(self.model))
        if processes_of(self.model).is_writer:
            self._files.save()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Removes the files, unless they are to be kept."""
        if self._is_of_a_strategy:
            super().on_train_end(logs)
            return
        gradients = gradients_of(self.model.optimizer)
        if gradients is not None and gradients.compressor is not None and self.delete_checkpoint:
            gradients.compressor.file(self._residuals).unlink(missing_ok=True)
            Exchange(gradients.group).barrier()  # the first process then removes the directory, which all may share
        if processes_of(self.model).is_writer:
            super().on_train_end(logs)
