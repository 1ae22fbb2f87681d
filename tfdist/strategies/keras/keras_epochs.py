"""The end of epochs: all processes stop after the same epoch, and compare weights."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras import keras_comparison


def install() -> None:
    """Installs the hook."""
    keras_hooks.add(EpochEndHooks)


class EpochEndHooks(keras_hooks.ModelHooks[DataParallel]):
    """The hook that makes `EpochSynchronization` the last callback of `fit`, except under elastic membership."""

    ability = DataParallel

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Adds the callback `EpochSynchronization`, where all processes call `fit` together."""
        return [*given, EpochSynchronization(self.extended)] if self.extended.runs_in_lockstep else given


class EpochSynchronization(keras_hooks.StrategyCallback[DataParallel]):
    """A callback that stops all ranks after the same epoch if any requests it, and compares their weights."""

    def __init__(self, extended: DataParallel) -> None:
        super().__init__(extended)
        self._before = False
        self._ends_at_once = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins without requests to stop."""
        # A callback of another `fit` may have called this one: its requests are restored at the end.
        self._before = self._extended.stopping.is_requested
        self._extended.stopping.begin()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Agrees with all ranks on ``stop_training`` before the first step, where a callback may have set it."""
        everyone, self._ends_at_once = self._extended.all_processes, False
        if self._extended.stopping.compares_begins:
            stops = everyone.all_gather(tf.constant([bool(self.model.stop_training)]))
            self._ends_at_once = self.model.stop_training = bool(stops.numpy().any())

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Defers ``stop_training`` until all ranks know of it: the others would wait for a rank that stops now."""
        if self._ends_at_once:
            return
        if self.model.stop_training and len(self._extended.all_processes.members) > 1:
            self._extended.stopping.is_requested, self.model.stop_training = True, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Agrees with all ranks on ``stop_training``, and compares weights.

        Raises:
            MismatchError: weights are not equal on all ranks.
        """
        stop = int(self._extended.stopping.is_requested or self.model.stop_training)
        stops = keras_comparison.compare(self.model, self._extended, f"after epoch {epoch + 1}", stop) > 0
        everyone = self._extended.all_processes
        if everyone is not self._extended.exchange:  # replicas are on several processes
            stops = bool(everyone.all_gather(tf.constant([stops])).numpy().any())
        self.model.stop_training = stops
        self._extended.stopping.begin()

    def on_train_end(self, logs: Any = None) -> None:
        """Compares weights once more: a callback of the user may have set them on some ranks.

        Raises:
            MismatchError: weights are not equal on all ranks.
        """
        self._extended.stopping.is_requested = self._before
        if self._extended.checks_weights:
            keras_comparison.compare(self.model, self._extended, "after the training")
