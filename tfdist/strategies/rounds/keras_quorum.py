"""Keras hooks for a strategy whose processes may join and leave: they align when epochs and `fit` begin and end."""

from __future__ import annotations

from typing import Any

from tfdist.private.models import begin_at, initial_epoch
from tfdist.seams.once import Once
from tfdist.seams.trainer import TrainerCall
from tfdist.strategies import keras_hooks
from tfdist.strategies.data.shares import batch_size
from tfdist.strategies.round_abilities import ElasticMembership

_NEVER = 1 << 62
"""Number of an epoch that no `fit` reaches."""


@Once
def install() -> None:
    """Installs the hook."""
    keras_hooks.add(ElasticModelHooks)


class ElasticModelHooks(keras_hooks.ModelHooks[ElasticMembership]):
    """Hooks that begin and end `fit` together with other processes, and count the samples of steps as weights."""

    ability = ElasticMembership

    def callbacks(self, model: Any, given: list[Any]) -> list[Any]:
        """Adds the callbacks that begin and end epochs and `fit` together with the others."""
        return [Pace(self.extended), *given, Beginning(self.extended)]

    def make_function(self, call: TrainerCall) -> None:
        """Makes steps count their samples; with several devices, their shares already do."""
        extended, step_function = self.extended, call.arguments["step_function"]
        if extended.has_several_replicas:
            return

        def step(data: Any) -> Any:
            with extended.counting(batch_size(data)):
                return step_function(data)

        call.arguments["step_function"] = step


class Beginning(keras_hooks.StrategyCallback[ElasticMembership]):
    """Callback that begins `fit` at the epoch of the other processes.

    Comes after the user's callbacks, which may load a backup.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Joins the others' call of `fit`, and sets the epoch to begin at."""
        epoch = self._extended.begin_fit(self.model)
        begin_at(self.model, _NEVER if epoch < 0 else max(epoch, initial_epoch(self.model)))

    def on_train_end(self, logs: Any = None) -> None:
        """Removes the epoch to begin at."""
        begin_at(self.model, None)


class Pace(keras_hooks.StrategyCallback[ElasticMembership]):
    """Callback that ends an epoch when other processes have ended it, and `fit` likewise.

    Comes before the user's callbacks, which may end `fit` after an epoch, and save its results.
    """

    def __init__(self, extended: ElasticMembership) -> None:
        super().__init__(extended)
        self._ends_epoch = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Tells the strategy which epoch begins."""
        self._extended.begin_epoch(self.model, epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stops the epoch or `fit` if the others have ended it."""
        if self.model.stop_training:
            return
        if self._extended.fit_is_over(self.model):
            self.model.stop_training = True
        elif self._extended.epoch_has_ended(self.model):
            self._ends_epoch = self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Lets `fit` go on after an epoch that the others have ended, unless they have ended `fit`."""
        if self._ends_epoch:
            self._ends_epoch = False
            self.model.stop_training = self._extended.fit_is_over(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Ends this call of `fit` together with the others."""
        self._extended.end_fit(self.model)
