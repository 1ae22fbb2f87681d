"""Abilities of strategies whose processes take steps on their own, and meet in rounds; see `abilities.py`."""

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
    """Processes take steps on their own, and exchange what they have learned after some of them."""

    calls_host_in_steps = True

    @abc.abstractmethod
    def build(self, optimizer: Any, variables: list[Any]) -> None:
        """Builds an optimizer in its first step.

        Args:
            optimizer: a Keras optimizer.
            variables: that it is to update.
        """

    @abc.abstractmethod
    def step_begins(self, optimizer: Any) -> None:
        """Learns with which weights an optimizer begins, if it is new; called by each replica as `step_taken`.

        Args:
            optimizer: a Keras optimizer that is built, and about to be applied.
        """

    @abc.abstractmethod
    def step_taken(self, optimizer: Any) -> None:
        """Makes the exchange whose turn it is, if any; called by each replica, in the graph or eagerly.

        Args:
            optimizer: a Keras optimizer that has been applied.
        """

    @abc.abstractmethod
    def begin_rounds(self, model: Any, anew: bool) -> None:
        """Begins a round, where none is under way; all processes call it.

        Args:
            model: a Keras model.
            anew: whether the weights that it has are the common ones from now on; they are equal on all processes.
        """

    @abc.abstractmethod
    def settle(self, model: Any) -> None:
        """Ends the round when all processes have taken their steps, and makes the weights equal; all call it.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def outer_states(self, model: Any) -> list[States]:
        """The states of outer optimizers, for each optimizer of a model and each rule of its rounds; may be empty.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def restore_outer(self, model: Any, states: Sequence[States]) -> None:
        """Gives outer optimizers, also those that are yet to be made, the states of a file.

        Args:
            model: a Keras model.
            states: as `outer_states` returned them.
        """

    @abc.abstractmethod
    def distance(self, model: Any) -> float | None:
        """How far the processes' weights of a model were from their mean when the last round ended.

        Args:
            model: a Keras model.

        Returns:
            As of `tfdist.local_sgd.course.Course`; the largest one of several optimizers.
        """

    @abc.abstractmethod
    def staleness(self, model: Any) -> Counter[int]:
        """How many rounds old what this process has used of others' weights was, and how often, since the start.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def assigned(self, variable: Any) -> None:
        """Notes that a user's program has assigned a value, which is then equal on all processes.

        Args:
            variable: a Keras variable.
        """

    @abc.abstractmethod
    def moving_averages(self, model: Any) -> list[Any]:
        """The moving averages that a model's optimizer keeps of weights, or that steps keep in weights of their own.

        The latter are trainable variables that no optimizer has updated, as those of a network that follows another.

        Args:
            model: a Keras model.
        """


class ComesAndGoes(TrainsInRounds):
    """Processes may come, and come again, while others train; each reads all data that it is given."""

    acts_alike = False

    @abc.abstractmethod
    def counting(self, samples: Any) -> contextlib.AbstractContextManager[None]:
        """Context of a step on so many samples, as it is traced or run eagerly.

        Args:
            samples: an int64 scalar tensor.
        """

    @abc.abstractmethod
    def begin_fit(self, model: Any) -> int:
        """Takes part in a call of `fit`, with the weights and optimizers of those that are in it already.

        Args:
            model: a Keras model.

        Returns:
            The epoch that they are in; -1 if they have ended this call.
        """

    @abc.abstractmethod
    def share_loaded(self, model: Any) -> None:
        """Gives all processes, which call it, the weights and optimizers that the writer has loaded.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def begin_epoch(self, model: Any, epoch: int) -> None:
        """Tells those that come which epoch has begun, and with which learning rates; before the user's callbacks.

        Args:
            model: a Keras model.
            epoch: its number.
        """

    @abc.abstractmethod
    def epoch_has_ended(self, model: Any) -> bool:
        """Whether the last round was the end of an epoch for others.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def fit_is_over(self, model: Any) -> bool:
        """Whether the others have ended the call of `fit` under way.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def end_fit(self, model: Any) -> None:
        """Tells the others that this call of `fit` has ended; gets and gives what is newest in it.

        Args:
            model: a Keras model.
        """
