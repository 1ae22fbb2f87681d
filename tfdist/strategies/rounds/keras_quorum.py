"""Keras under a strategy whose processes come and go: where `fit` begins, and when an epoch and a `fit` end."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.private.models import begin_at, initial_epoch
from tfdist.seams.once import Once
from tfdist.seams.trainer import ModelCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.data.shares import batch_size
from tfdist.strategies.round_abilities import ComesAndGoes

_NEVER = 1 << 62
"""An epoch that no `fit` comes to."""


@Once
def install() -> None:
    """Installs the hook."""
    keras_hooks.add(Coming)


class Coming(keras_hooks.ModelHooks[ComesAndGoes]):
    """`fit` begins and ends with the others, and steps know their number of samples, by which they are weighed."""

    ability = ComesAndGoes

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Keeps pace with the others."""
        return [Pace(self.extended), *given, Beginning(self.extended)]

    def make_function(self, call: ModelCall) -> None:
        """Has steps count; those of several devices are on shares, which are counted."""
        extended, step_function = self.extended, call.arguments["step_function"]
        if extended.has_several_replicas:
            return

        def step(data: Any) -> Any:
            with extended.counting(batch_size(data)):
                return step_function(data)

        call.arguments["step_function"] = step


class Beginning(keras.callbacks.Callback):
    """Has `fit` begin with the epoch that the others are in. Comes after the user's callbacks, which may load a backup.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: ComesAndGoes) -> None:
        super().__init__()
        self._extended = extended

    def on_train_begin(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        epoch = self._extended.begin_fit(self.model)
        begin_at(self.model, _NEVER if epoch < 0 else max(epoch, initial_epoch(self.model)))

    def on_train_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        begin_at(self.model, None)


class Pace(keras.callbacks.Callback):
    """Ends an epoch when the others have ended it, and `fit` when they have ended that.

    Comes before the user's callbacks, which may end `fit` when an epoch has ended, and save what it ends with.

    Args:
        extended: the strategy's `extended`.
    """

    def __init__(self, extended: ComesAndGoes) -> None:
        super().__init__()
        self._extended = extended
        self._ends_epoch = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self._extended.begin_epoch(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        if self.model.stop_training:
            return
        if self._extended.fit_is_over(self.model):
            self.model.stop_training = True
        elif self._extended.epoch_has_ended(self.model):
            self._ends_epoch = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        if self._ends_epoch:
            self._ends_epoch = False
            self.model.stop_training = self._extended.fit_is_over(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """See `keras.callbacks.Callback`."""
        self._extended.end_fit(self.model)
