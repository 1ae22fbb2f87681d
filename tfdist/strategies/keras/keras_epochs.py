"""Epochs end together: all processes stop after the same one, and compare weights."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.strategies import keras_hooks
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras import keras_callbacks, keras_comparison

_WITHIN_EPOCHS = ("on_epoch_begin", "on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def install() -> None:
    """Installs the hook."""
    keras_hooks.add(Ending)


class Ending(keras_hooks.ModelHooks[DataParallel]):
    """Where processes do not come and go, the last callback of `fit` is `Together`."""

    ability = DataParallel

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Adds it, and agrees on whether callbacks of any process may end the steps of an epoch."""
        if not self.extended.acts_alike:
            return given
        may_end = any(map(may_end_steps, given))
        everyone = self.extended.everyone
        if len(everyone.members) > 1 and not self.extended.is_local_only:
            may_end = bool(everyone.all_gather(tf.constant([may_end])).numpy().any())
        self.extended.stopping.may_be_wished = may_end
        return [*given, Together(self.extended)]


def may_end_steps(callback: Any) -> bool:
    """Whether a callback may set ``stop_training`` in the middle of an epoch: whether it does something there.

    Of Keras's own, only `keras.callbacks.TerminateOnNaN` and what a `keras.callbacks.LambdaCallback` calls do.
    """
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return True
    for name in _WITHIN_EPOCHS:
        owner = next((kind for kind in type(callback).__mro__ if name in vars(kind)), None)
        is_known = owner is not None and owner.__module__.partition(".")[0] in ("keras", "tfdist")
        if not is_known or (name in vars(callback) and not isinstance(callback, keras_callbacks.WRITING)):
            return True
    return False


class Together(keras.callbacks.Callback):
    """Stops all ranks at the end of an epoch if any requests it, and compares their weights and optimizer state.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: DataParallel) -> None:
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
        everyone = self._extended.everyone
        if everyone is not self._extended.exchange:  # replicas are on several processes
            stops = bool(everyone.all_gather(tf.constant([stops])).numpy().any())
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
