"""Interface of the exchanges of one optimizer with other processes, as its training steps see them."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tfdist.compression.compressor import Compressor
from tfdist.local_sgd.rules import Rule, States


@dataclass(frozen=True)
class Progress:
    """The number of samples and steps that a process has trained.

    Attributes:
        samples: number of samples trained on.
        step: number of steps taken.
    """

    samples: int
    step: int


@dataclass(frozen=True)
class Turn:
    """The next action of a course.

    Attributes:
        left: number of steps until the action is due.
        what: number of the action, from 0 to `Course.turns` - 1.
    """

    left: int
    what: int


@dataclass(frozen=True)
class VariableGroup:
    """A group of variables that are exchanged: those of an optimizer, or the state of layers.

    Attributes:
        name: name of the group, the same on all processes.
        paths: paths of the variables, followed by those of the optimizer's slots if slots are exchanged.
        centre: values that the variables have in common on all processes; initially their own values.
        learning_rate: current learning rate of the optimizer.
        live: access to the optimizer while it trains, for processes that join later; None if none can join.
        rules: states of the rounds' rules from a file, which the rules begin with; empty if there are none.
        keys: keys of the variables, by which a `Compressor` knows them; may be empty if nothing is compressed.
    """

    name: str
    paths: list[str]
    centre: MutableSequence[np.ndarray]
    learning_rate: float
    live: Live | None = None
    rules: States = field(default_factory=list)
    keys: list[str] = field(default_factory=list)


class Live(abc.ABC):
    """Access to an optimizer while it trains; may be read on any thread."""

    @abc.abstractmethod
    def state(self) -> list[np.ndarray]:
        """Returns copies of the optimizer's own variables: slots, the number of updates, the learning rate."""

    def rates(self) -> list[float]:
        """Returns the learning rates that can be set: several for a `keras.optimizers.MultiOptimizer`."""
        return []

    @abc.abstractmethod
    def left(self) -> int:
        """Returns the number of steps until the next action."""

    @abc.abstractmethod
    def step(self) -> int:
        """Returns the number of steps taken."""


class JoinedRounds(NamedTuple):
    """The state that a process begins with if it joins later than others.

    Attributes:
        step: the number of steps that count as taken.
        state: values of the optimizer's variables, as `Live.state` returns them.
        rates: values of the learning rates, as `Live.rates` returns them; None if ``state`` holds the right ones.
        epoch: epoch of the process that gave the state; -1 outside of `fit`.
    """

    step: int
    state: list[np.ndarray]
    rates: tuple[float, ...] | None = None
    epoch: int = -1


class RoundResult(NamedTuple):
    """The result of `Course.settle`.

    Attributes:
        step: the number of steps that count as taken, the same for all processes.
        values: values of all variables and slots.
        changes: whether a process had something to exchange.
    """

    step: int
    values: list[np.ndarray]
    changes: bool


class Course(abc.ABC):
    """A schedule of exchanges with other processes: which values are exchanged after which step.

    Values are those of an optimizer's variables, followed by those of its slots, if slots are exchanged.

    Attributes:
        centre: values that the variables have in common on all processes; its arrays are replaced, not changed.
        turns: number of different actions, which are numbered from 0.
        learning_rate: the optimizer's learning rate at the last action or beginning, which an `Interval` may follow.
        distance: distance of the processes' variables from their mean at the end of the last round: the root of the
            mean of its squares, divided by the length of the mean. None if it is not measured.
        joined: state that this process begins with if it has joined later than others and took over their centre.
    """

    centre: MutableSequence[np.ndarray]
    turns: int
    learning_rate: float
    distance: float | None = None
    joined: JoinedRounds | None = None

    def refresh(self) -> bool:
        """Takes over a newer state of another process, if there is one, as at the beginning.

        Returns:
            Whether there was one; then `joined` holds the state that the optimizer continues with.
        """
        return False

    def follow(self, seconds: float) -> bool:
        """Like `refresh`, but waits for a state that another process gives all others.

        Changes that were not sent are dropped.

        Args:
            seconds: maximum time to wait, in seconds.
        """
        return False

    @property
    def rules(self) -> list[tuple[Rule, list[np.ndarray]]]:
        """The rules of the rounds that may have a state, each with the values in the centre that it is for."""
        return []

    @property
    def staleness(self) -> Counter[int]:
        """How often contributions of each age, in rounds, have been used since the start."""
        return Counter()

    @abc.abstractmethod
    def places(self, what: int) -> list[int]:
        """Returns the indices of the values that an action exchanges.

        Args:
            what: number of the action.
        """

    def replaces(self, what: int) -> bool:
        """Returns whether an action gives these values new ones.

        Args:
            what: number of the action.
        """
        return True

    @abc.abstractmethod
    def take(
        self, what: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Performs an action in a training step.

        Args:
            what: number of the action.
            progress: progress of this process.
            learning_rate: current learning rate of the optimizer.
            values: values at the indices that `places` returns; only read.

        Returns:
            The next action, and the new values in arrays of their own; no values if the action `replaces` none.
        """

    @abc.abstractmethod
    def settle(self, progress: Progress, values: Sequence[np.ndarray]) -> RoundResult:
        """Ends the round once all processes have taken their steps; all processes call it.

        Args:
            progress: progress of this process.
            values: values of all variables and slots of this process.

        Returns:
            The result. If anything has changed, the caller sets the variables to `centre` and calls `begin_anew`.
        """

    @abc.abstractmethod
    def first(self, step: int) -> Turn | None:
        """Returns the first action of a round that is about to begin, by `learning_rate`; None if that is settled.

        Args:
            step: number of steps taken.
        """

    @abc.abstractmethod
    def begin_anew(self, progress: Progress) -> Turn:
        """Begins a round, after `settle` or if none is under way.

        Args:
            progress: progress of this process; its step is the same on all processes.

        Returns:
            The next action.
        """

    @abc.abstractmethod
    def assigned(self, place: int, value: np.ndarray, progress: Progress) -> None:
        """Notes a value that the user's program has assigned on all processes, and which is then the common one.

        Args:
            place: index of the variable.
            value: the value assigned to the variable.
            progress: progress of this process.
        """


class StopRequests:
    """Requests of processes that all stop taking steps; this base class makes none."""

    def own(self) -> int:
        """Returns 1 if this process requests a stop, else 0."""
        return 0

    def learn(self, wishes: int) -> None:
        """Receives the number of processes that request a stop, in each exchange.

        Args:
            wishes: number of requests of all processes.
        """


class Courses(abc.ABC):
    """Makes the course of each optimizer of a strategy.

    Attributes:
        wishes: requests to stop, which are sent along with exchanges of all processes.
        described: description of the strategy's arguments, which must be the same on all processes.
        with_slots: whether slots are exchanged.
        compressor: compressor of the exchanged values, whose residuals are saved with the model's weights; None for no
            compression.
    """

    wishes: StopRequests = StopRequests()
    described: str = ""
    with_slots: bool = False
    compressor: Compressor | None = None

    @abc.abstractmethod
    def of(self, trained: VariableGroup) -> Course:
        """Returns a new course for a group of variables.

        Args:
            trained: the variables.
        """
