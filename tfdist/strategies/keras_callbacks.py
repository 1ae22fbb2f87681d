"""Adapts a user's callbacks to several processes."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.keras import tree
from tfdist.strategies import (
    keras_backup,
    keras_comparison,
    keras_delayed,
    keras_quorum,
    keras_rounds,
    keras_saving,
    keras_servers,
)
from tfdist.strategies.abilities import (
    Ability,
    DelaysUpdates,
    EndsEpochsTogether,
    HasStages,
    LoadsForAll,
    UpdatesOnServers,
    WritesOnce,
)
from tfdist.strategies.round_abilities import ComesAndGoes, TrainsInRounds

WRITING = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks that only write; they run on the writer alone."""

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def adapt(callbacks: Any, extended: Ability) -> Any:
    """The callbacks that this process runs: the user's, and tfdist's own.

    Args:
        callbacks: the ``callbacks`` argument of ``fit``.
        extended: the strategy's `extended`.

    Returns:
        A list, or the user's `CallbackList`, modified in place.
    """
    given = (
        callbacks.callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else tree.flatten(callbacks or [])
    )
    kept = []
    for callback in given:
        if isinstance(callback, WRITING) and isinstance(extended, WritesOnce):
            # When the writer saves the model, every rank saves its residuals, if there are some, or gives it weights.
            takes_part = keras_saving.compressor_of(extended) is not None or isinstance(extended, HasStages)
            saves_own = takes_part and isinstance(callback, keras.callbacks.ModelCheckpoint)
            if isinstance(extended, HasStages) and _reads_weights(callback):
                callback = _showing_all_weights(callback, extended)
            elif not extended.is_writer and not saves_own:
                continue
            _keep_local(callback, extended)
        elif isinstance(callback, keras.callbacks.BackupAndRestore):
            if isinstance(extended, LoadsForAll):
                keras_backup.share(callback, extended)
            elif isinstance(extended, UpdatesOnServers) and isinstance(extended, WritesOnce) and not extended.is_writer:
                callback = keras_backup.OfWorker(callback, extended.worker)
        kept.append(callback)
    first: list[Any] = [keras_servers.Pauses(extended)] if isinstance(extended, UpdatesOnServers) else []
    first += [keras_rounds.Rounds(extended)] if isinstance(extended, TrainsInRounds) else []
    first += [keras_quorum.Pace(extended)] if isinstance(extended, ComesAndGoes) else []
    first += [keras_delayed.LastUpdates(extended)] if isinstance(extended, DelaysUpdates) else []
    last: list[Any] = []
    if isinstance(extended, ComesAndGoes):
        last.append(keras_quorum.Beginning(extended))
    elif isinstance(extended, EndsEpochsTogether):
        last.append(Together(extended))
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks.callbacks[:] = [*first, *kept, *last]
        for callback in (*first, *last):
            callback.set_model(callbacks.model)
        return callbacks
    return [*first, *kept, *last]


class _GivesWeights(keras.callbacks.Callback):
    """Gives the writer the weights of this process's stages, when it reads them.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: HasStages) -> None:
        super().__init__()
        self._extended = extended

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self._extended.by_the_writer(self.model, lambda: None)


def _reads_weights(callback: Any) -> bool:
    return isinstance(callback, keras.callbacks.TensorBoard) and bool(callback.histogram_freq)


def _showing_all_weights(callback: Any, extended: HasStages) -> Any:
    """A callback that reads weights at the end of epochs; on processes but the writer, one that gives it theirs."""
    if not extended.is_writer:
        return _GivesWeights(extended)
    if not getattr(callback, "_tfdist_local", False):
        hook = callback.on_epoch_end

        @functools.wraps(hook)
        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            extended.by_the_writer(callback.model, lambda: hook(epoch, logs))

        callback.on_epoch_end = on_epoch_end
    return callback


def _keep_local(callback: Any, extended: WritesOnce) -> None:
    """Makes the writer's callback run without collectives."""
    if getattr(callback, "_tfdist_local", False):
        return
    callback._tfdist_local = True
    for name in _HOOKS:
        setattr(callback, name, _locally(getattr(callback, name), extended))


def _locally(hook: Any, extended: WritesOnce) -> Any:
    @functools.wraps(hook)
    def method(*args: Any, **kwargs: Any) -> Any:
        with extended.local_only():
            return hook(*args, **kwargs)

    return method


class Together(keras.callbacks.Callback):
    """Stops all ranks at the end of an epoch if any requests it, and compares their weights and optimizer state.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: EndsEpochsTogether) -> None:
        super().__init__()
        self._extended = extended
        self._before = False

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        # This `fit` may be within another one, of a callback.
        self._before = self._extended.stopping.is_wished
        self._extended.stopping.begin()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Defers ``stop_training`` until all know of it: the others would wait for a rank that stops now."""
        if self.model.stop_training and len(self._extended.everyone.members) > 1:
            self._extended.stopping.is_wished, self.model.stop_training = True, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agrees with all ranks on ``stop_training``, and compares weights.

        Raises:
            MismatchError: weights are not equal on all ranks.
        """
        stop = int(self._extended.stopping.is_wished or self.model.stop_training)
        stops = keras_comparison.compare(self.model, self._extended, f"after epoch {epoch + 1}", stop) > 0
        if isinstance(self._extended, HasStages):  # whose replicas are on several processes
            stops = bool(self._extended.everyone.all_gather(tf.constant([stops])).numpy().any())
        self.model.stop_training = stops
        self._extended.stopping.begin()

    def on_train_end(self, logs: Any = None) -> None:
        """Compares weights once more: a callback of the user may have set them on some ranks.

        Raises:
            MismatchError: they are not equal on all ranks.
        """
        self._extended.stopping.is_wished = self._before
        if self._extended.checks_weights:
            keras_comparison.compare(self.model, self._extended, "after the training")
