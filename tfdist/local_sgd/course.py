"""What the course of training in rounds is, for one optimizer: seen from the steps that follow it."""

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
    """How far a process has come.

    Attributes:
        samples: that it has trained on.
        step: the number of steps taken.
    """

    samples: int
    step: int


@dataclass(frozen=True)
class Turn:
    """What is to be done next.

    Attributes:
        left: after how many more steps.
        what: its number, as a `Course` numbers what it does.
    """

    left: int
    what: int


@dataclass(frozen=True)
class Trained:
    """What an optimizer trains.

    Attributes:
        name: of the optimizer, the same on all processes.
        paths: of its variables, followed by those of its slots, if they take part.
        centre: what its variables have in common: at first their values.
        learning_rate: of the optimizer, now.
        live: what it is doing, for those who come to it while it trains; None if nobody does.
        rules: the states of the rules of its rounds that a file has, which they begin with.
    """

    name: str
    paths: list[str]
    centre: MutableSequence[np.ndarray]
    learning_rate: float
    live: Live | None = None
    rules: States = field(default_factory=list)


class Live(abc.ABC):
    """An optimizer while it trains; may be read on any thread."""

    @abc.abstractmethod
    def state(self) -> list[np.ndarray]:
        """The values of its own variables: slots, the number of updates, the learning rate; in arrays of their own."""

    def rates(self) -> list[float]:
        """The values of its learning rates that can be set: several of a `keras.optimizers.MultiOptimizer`."""
        return []

    @abc.abstractmethod
    def left(self) -> int:
        """After how many more steps the next turn comes."""

    @abc.abstractmethod
    def step(self) -> int:
        """The number of steps taken."""


class Joined(NamedTuple):
    """What a process that comes later begins with.

    Attributes:
        step: the number of steps that count as taken.
        state: values of the optimizer's variables, as of `Live`.
        rates: values of its learning rates, as of `Live`; None if they are those in ``state``.
        epoch: that the process which gave the state is in; -1 outside of `fit`.
    """

    step: int
    state: list[np.ndarray]
    rates: tuple[float, ...] | None = None
    epoch: int = -1


class Settled(NamedTuple):
    """The end of a round.

    Attributes:
        step: the number of steps that count as taken, the same for all processes.
        values: of all variables and slots.
        changes: whether a process had something to exchange.
    """

    step: int
    values: list[np.ndarray]
    changes: bool


class Course(abc.ABC):
    """What is exchanged with other processes after which step.

    Values are those of an optimizer's variables, followed by those of its slots, if they take part.

    Attributes:
        centre: what the variables of all processes have in common; its arrays are replaced, not changed.
        turns: how many things there are to do, which have the numbers below this one.
        distance: at the end of the last round, of the processes' variables from their mean: the root of the mean of
            their squares, divided by the length of the mean. None if it is not measured.
        joined: if this process has come later than others, and the centre is theirs.
    """

    centre: MutableSequence[np.ndarray]
    turns: int
    distance: float | None = None
    joined: Joined | None = None

    def refresh(self) -> bool:
        """Takes a newer state of another process over, if there is one, as the beginning does.

        Returns:
            Whether there was one; then `joined` says what the optimizer goes on with.
        """
        return False

    def follow(self, seconds: float) -> bool:
        """As `refresh`, when another process has given all another state, or is about to; drops what is not exchanged.

        Args:
            seconds: to wait for it.
        """
        return False

    @property
    def rules(self) -> list[tuple[Rule, list[np.ndarray]]]:
        """The rules of the rounds that may have a state, each with the values in the centre that it is for."""
        return []

    @property
    def staleness(self) -> Counter[int]:
        """How many rounds old what has been used of other processes was, and how often, since the start."""
        return Counter()

    @abc.abstractmethod
    def places(self, what: int) -> list[int]:
        """The places of the values that a turn is about.

        Args:
            what: as of `Turn`.
        """

    def replaces(self, what: int) -> bool:
        """Whether a turn gives these values new ones.

        Args:
            what: as of `Turn`.
        """
        return True

    @abc.abstractmethod
    def take(
        self, what: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Does what is to be done, in a step of training.

        Args:
            what: as of `Turn`.
            progress: of this process.
            learning_rate: of the optimizer.
            values: at `places`; only read.

        Returns:
            What comes next, and the new values, in arrays of their own; none where it `replaces` nothing.
        """

    @abc.abstractmethod
    def settle(self, progress: Progress, values: Sequence[np.ndarray]) -> Settled:
        """Ends the round once all processes have taken their steps; all call it.

        Args:
            progress: of this process.
            values: all of them.

        Returns:
            What comes of it. If anything has changed, the variables are to become `centre`; `begin_anew` is to follow.
        """

    @abc.abstractmethod
    def begin_anew(self, progress: Progress) -> Turn:
        """Begins a round, after `settle` or where none was under way.

        Args:
            progress: of this process; of all the same step.

        Returns:
            What comes next.
        """

    @abc.abstractmethod
    def assigned(self, place: int, value: np.ndarray, progress: Progress) -> None:
        """Notes that the user's program has assigned a value, equal on all processes, which is then the common one.

        Args:
            place: of the variable.
            value: of it.
            progress: of this process.
        """


class Wishes:
    """Whether a process wishes that all take no more steps; here nobody does."""

    def own(self) -> int:
        """1 if this process wishes so."""
        return 0

    def learn(self, wishes: int) -> None:
        """Is told in each exchange how many processes wish so.

        Args:
            wishes: of all.
        """


class Courses(abc.ABC):
    """Makes the course of each optimizer of a strategy.

    Attributes:
        wishes: that go along with exchanges in which all processes take part.
        described: the arguments of the strategy, which all processes must have alike.
        with_slots: whether slots take part.
        compressor: of what is exchanged, whose residuals are saved with the model's weights; None for none.
    """

    wishes: Wishes = Wishes()
    described: str = ""
    with_slots: bool = False
    compressor: Compressor | None = None

    @abc.abstractmethod
    def of(self, trained: Trained) -> Course:
        """A new course.

        Args:
            trained: by the optimizer.
        """
