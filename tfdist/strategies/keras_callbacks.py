"""What becomes of a user's callbacks when several processes run them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from keras.src import tree

from tfdist.strategies import keras_saving
from tfdist.strategies.extended import AllReduceExtended

WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks whose work is to write: only the chief's do."""

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def adapt(callbacks: Any, extended: AllReduceExtended) -> Any:
    """The callbacks that this process runs: the user's, around them tfdist's own.

    Args:
        callbacks: what the user gave to ``fit``.
        extended: of the strategy.

    Returns:
        A list, or the user's `CallbackList`, changed.
    """
    given = (
        callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else tree.flatten(callbacks or [])
    )
    kept = []
    for callback in given:
        if isinstance(callback, WRITING):
            # Where there are residuals, every rank saves its own when the chief saves the model.
            saves_own = extended.compressor is not None and isinstance(callback, keras.callbacks.ModelCheckpoint)
            if not extended.world.is_chief and not saves_own:
                continue
            _keep_local(callback, extended)
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            _restore_for_all(callback, extended)
        kept.append(callback)
    adapted = [StateAverage(extended), *kept, StopTogether(extended)]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = adapted
        for own in (adapted[0], adapted[-1]):
            own.set_model(callbacks.model)
        return callbacks
    return adapted


def _keep_local(callback: Any, extended: AllReduceExtended) -> None:
    """Whatever the chief's callback reads, it reads without the other ranks."""
    if getattr(callback, "_tfdist_local", False):
        return
    callback._tfdist_local = True
    for name in _HOOKS:
        setattr(callback, name, _locally(getattr(callback, name), extended))


def _locally(hook: Any, extended: AllReduceExtended) -> Any:
    @functools.wraps(hook)
    def method(*args: Any, **kwargs: Any) -> Any:
        with extended.local_only():
            return hook(*args, **kwargs)

    return method


def _restore_for_all(callback: Any, extended: AllReduceExtended) -> None:
    """`BackupAndRestore`: the chief reads and writes; the epoch to go on from is the chief's."""
    if getattr(callback, "_tfdist_restores", False):
        return
    callback._tfdist_restores = True
    exchange, chief = extended.exchange, extended.world.is_chief
    load = callback._load_model

    def load_for_all() -> None:
        failure = None
        if chief:
            try:
                with extended.local_only(), extended.reading_for_all():
                    load()
            except Exception as error:
                failure = error
        model = callback.model
        status = tf.constant([0 if failure is None else 1, model._initial_epoch or 0], tf.int64)
        status = exchange.broadcast_once(status, "what the backup holds", "int64 (2,)").numpy()
        if failure is not None:
            raise failure
        if status[0]:
            raise OSError(f"the chief could not read the backup in {callback.backup_dir}; its own error says why")
        model._initial_epoch = int(status[1])
        if status[1] and not chief and model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        broadcast_state(model, extended)
        if status[1]:
            keras_saving.restore_compression(extended, _backup(callback))

    callback._load_model = load_for_all
    compressor, save, end = extended.compressor, callback._save_model, callback.on_train_end

    def save_own() -> None:
        if compressor is not None:
            Path(callback.backup_dir).mkdir(parents=True, exist_ok=True)
            compressor.save(_backup(callback))
        if chief:
            with extended.local_only():
                save()

    def end_own(logs: Any = None) -> None:
        if compressor is not None and callback.delete_checkpoint:
            compressor.file(_backup(callback)).unlink(missing_ok=True)
            exchange.barrier()  # the chief removes the folder, which may be the same one
        if chief:
            end(logs)

    callback._save_model, callback.on_train_end = save_own, end_own


def _backup(callback: Any) -> Path:
    return Path(callback.backup_dir) / "residuals"


def broadcast_state(model: Any, extended: AllReduceExtended) -> None:
    """Gives every process the chief's weights and optimizer state."""
    variables = list(model.variables)
    if getattr(model, "optimizer", None) is not None:
        variables += model.optimizer.variables
    seen: set[int] = set()
    for variable in variables:
        if id(variable) in seen or getattr(variable, "synchronization", None) == "on_read":
            continue
        seen.add(id(variable))
        value = tf.convert_to_tensor(variable.value)
        key = f"the state of {variable.path} {value.dtype.name} {value.shape}"
        variable.assign(extended.exchange.broadcast_once(value, key, f"{value.dtype.name} {value.shape}"))


def average_local_state(model: Any, extended: AllReduceExtended) -> None:
    """Averages the state that each replica keeps for itself while it trains, such as moving statistics.

    Keras keeps the moving averages of BatchNormalization apart on every replica. Before they are used or saved
    they become equal: the mean over all replicas that have a finite value (one that has seen no sample has none).
    """
    # Frozen weights are not among them: they were made trainable, and nothing changes them.
    kept_apart = {
        id(variable): variable
        for layer in model._flatten_layers()
        for variable in layer._non_trainable_variables
        if variable.dtype.startswith(("float", "bfloat")) and variable.synchronization != "on_read"
    }
    variables = list(kept_apart.values())
    if not variables:
        return
    sums = []
    for variable in variables:
        parts = [tf.cast(part, tf.float64) for part in _replica_values(variable.value)]
        finite = [tf.math.is_finite(part) for part in parts]
        sums.append(tf.add_n([tf.where(known, part, 0.0) for known, part in zip(finite, parts, strict=True)]))
        sums.append(tf.add_n([tf.cast(known, tf.float64) for known in finite]))
    sums = extended.bridge.all_reduce(sums)
    for variable, total, count in zip(variables, sums[::2], sums[1::2], strict=True):
        own = tf.cast(_replica_values(variable.value)[0], tf.float64)
        mean = tf.where(count > 0, tf.math.divide_no_nan(total, count), own)
        variable.assign(tf.cast(mean, variable.dtype))


def _replica_values(variable: Any) -> list[tf.Tensor]:
    return [tf.convert_to_tensor(part) for part in getattr(variable, "values", (variable,))]


class StateAverage(keras.callbacks.Callback):
    """Makes local state equal before any other callback sees the end of an epoch."""

    def __init__(self, extended: AllReduceExtended) -> None:
        super().__init__()
        self._extended = extended

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages it."""
        average_local_state(self.model, self._extended)

    def on_train_end(self, logs: Any = None) -> None:
        """Averages it."""
        average_local_state(self.model, self._extended)


class StopTogether(keras.callbacks.Callback):
    """Any rank's wish to stop stops all ranks, at the end of the epoch."""

    def __init__(self, extended: AllReduceExtended) -> None:
        super().__init__()
        self._extended = extended
        self._wish = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Puts a wish off: a rank that left the epoch now would leave the others waiting."""
        if self.model.stop_training:
            self._wish, self.model.stop_training = True, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Asks all ranks."""
        wish = tf.constant([int(self._wish or self.model.stop_training)], tf.int32)
        self.model.stop_training = bool(self._extended.bridge.all_reduce([wish])[0][0] > 0)
        self._wish = False
