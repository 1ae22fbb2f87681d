"""Abilities of strategies whose processes take steps on their own and exchange weights in rounds."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdist.strategies.abilities import DataParallel

if TYPE_CHECKING:
    from collections import Counter

    from tfdist.local_sgd.rules import States


class TrainsInRounds(DataParallel):
    """A strategy whose processes take steps on their own, and exchange weights after some of the steps."""

    calls_host_in_steps = True

    @abc.abstractmethod
    def build(self, optimizer: Any, variables: list[Any]) -> None:
        """Builds an optimizer in its first step.

        Args:
            optimizer: a Keras optimizer.
            variables: variables that the optimizer is to update.
        """

    @abc.abstractmethod
    def step_begins(self, optimizer: Any) -> None:
        """Notes the weights that a new optimizer begins with; called by each replica, like `step_taken`.

        Args:
            optimizer: a Keras optimizer that is built, and about to be applied.
        """

    @abc.abstractmethod
    def step_taken(self, optimizer: Any) -> None:
        """Makes the exchange that is due after a step, if any; called by each replica, in the graph or eagerly.

        Args:
            optimizer: a Keras optimizer that has been applied.
        """

    @abc.abstractmethod
    def begin_rounds(self, model: Any, anew: bool) -> None:
        """Begins a round, where none is under way; all processes call it.

        Args:
            model: a Keras model.
            anew: whether the model's weights, equal on all processes, become the centre that rounds begin from.
        """

    @abc.abstractmethod
    def settle(self, model: Any) -> None:
        """Ends the round after the last step, and makes the weights equal; all processes call it.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def outer_states(self, model: Any) -> list[States]:
        """Returns the states of outer optimizers, for each optimizer of a model and each rule of its rounds.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def restore_outer(self, model: Any, states: Sequence[States]) -> None:
        """Restores the states of outer optimizers, including those that are not made yet.

        Args:
            model: a Keras model.
            states: states of outer optimizers, as `outer_states` returned them; those that are missing begin anew.
        """

    @abc.abstractmethod
    def distance(self, model: Any) -> float | None:
        """Returns how far the processes' weights of a model were from their mean when the last round ended.

        Args:
            model: a Keras model.

        Returns:
            The root mean square of the processes' distances from the mean, divided by the length of the mean; the
            largest of several optimizers. None if it is not measured.
        """

    @abc.abstractmethod
    def staleness(self, model: Any) -> Counter[int]:
        """Returns how often this process has used others' weights of each age, in rounds, since the start.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def moving_averages(self, model: Any) -> list[Any]:
        """Returns moving averages of weights, kept by a model's optimizer or by a custom step in a second network.

        The latter are trainable variables that no optimizer has updated, such as the weights of a target network.

        Args:
            model: a Keras model.
        """


class ElasticMembership(TrainsInRounds):
    """A strategy with elastic membership: processes may join and rejoin while others train; each reads all its data."""

    runs_in_lockstep = False

    @abc.abstractmethod
    def counting(self, samples: Any) -> contextlib.AbstractContextManager[None]:
        """Context of a step, as it is traced or run eagerly, that counts the step's samples.

        Args:
            samples: number of samples of the step, an int64 scalar tensor.
        """

    @abc.abstractmethod
    def begin_fit(self, model: Any) -> int:
        """Joins a call of `fit`, with the weights and optimizers of the processes that have begun it before.

        Args:
            model: a Keras model.

        Returns:
            The epoch that the others are in; -1 if they have ended this call.
        """

    @abc.abstractmethod
    def share_loaded(self, model: Any) -> None:
        """Gives all processes the weights and optimizers that the writer has loaded; all processes call it.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def begin_epoch(self, model: Any, epoch: int) -> None:
        """Notes the epoch and its learning rates for processes that join; called before the user's callbacks.

        Args:
            model: a Keras model.
            epoch: number of the epoch, from 0.
        """

    @abc.abstractmethod
    def epoch_has_ended(self, model: Any) -> bool:
        """Returns whether the last round was the end of an epoch for other processes.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def fit_is_over(self, model: Any) -> bool:
        """Returns whether other processes have ended the call of `fit` under way.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def end_fit(self, model: Any) -> None:
        """Tells other processes that this call of `fit` has ended; the newest weights become those of all.

        Args:
            model: a Keras model.
        """
