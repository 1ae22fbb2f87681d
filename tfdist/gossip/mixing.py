"""What is common to all ways in which a process brings its weights together with those of its neighbours."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from tfdist.gossip.lines import Lines
from tfdist.gossip.messages import Kind, Message
from tfdist.local_sgd.course import Wishes

Arrays = Sequence[np.ndarray]


class Mixing(abc.ABC):
    """Of the weights of one optimizer.

    A process that has taken its steps says so to all its neighbours, and hears out what they have still sent. They go
    on without it. If it has ended because a process wishes that all do, they end after that round, and say so in turn.

    Args:
        lines: to the neighbours.
        neighbours: their ranks.

    Attributes:
        wishes: whether a process wishes that all take no more steps.
        staleness: how many rounds old the weights were that have been mixed with, and how often.
    """

    def __init__(self, lines: Lines, neighbours: Iterable[int]) -> None:
        self.wishes = Wishes()
        self.staleness: Counter[int] = Counter()
        self._lines = lines
        self._neighbours = list(neighbours)
        self._ended: set[int] = set()
        self._stops = False
        self._round = 0
        self._generation = 0

    @property
    def _left(self) -> list[int]:
        """The neighbours that have not ended."""
        return [rank for rank in self._neighbours if rank not in self._ended]

    def begin(self, values: Arrays) -> None:
        """Begins anew, after `finish` or at first.

        Args:
            values: the weights, equal on all processes.
        """
        self._ended.clear()
        self._stops = False
        self._round = self._generation = 0

    @abc.abstractmethod
    def mix(self, values: Arrays) -> list[np.ndarray]:
        """A round.

        Args:
            values: this process's weights; only read.

        Returns:
            Its new ones, in arrays of their own.
        """

    def finish(self, values: Arrays) -> list[np.ndarray]:
        """Ends the rounds: waits until all neighbours have ended. All processes call it.

        Args:
            values: as of `mix`.

        Returns:
            As `mix`.
        """
        end = Kind.STOPPED if self._stops or self.wishes.own() else Kind.ENDED
        for rank in self._neighbours:
            self._lines.send(rank, self._message(end))
        new = [np.array(value) for value in values]
        for rank in self._left:
            while not (message := self._lines.await_next(rank, blocking=True)).kind.is_end:
                self._heard_at_the_end(rank, message, new)
        return new

    def _has_ended(self, rank: int, message: Message) -> None:
        """Notes that a neighbour has ended, as it says, while this process takes steps."""
        self._ended.add(rank)
        if message.kind == Kind.STOPPED:
            self._stops = True
            self.wishes.learn(1)

    def _heard_at_the_end(self, rank: int, message: Message, values: list[np.ndarray]) -> None:
        """Hears what was sent before its sender ended, when this process has ended; may change the weights."""
        return

    def assigned(self, place: int) -> None:
        """Notes that the user's program has assigned a value: what others have sent before says nothing about it.

        Args:
            place: of the variable.
        """
        self._generation += 1

    def _message(self, kind: Kind, parts: Sequence[np.ndarray] = ()) -> Message:
        return Message(kind, self._round, self._generation, parts)


def added(values: Arrays, changes: Arrays) -> list[np.ndarray]:
    """Sums, in arrays of their own.

    Args:
        values: some arrays.
        changes: one for each of them.
    """
    return [np.asarray(value + change) for value, change in zip(values, changes, strict=True)]


def like(parts: Arrays, values: Arrays) -> list[np.ndarray]:
    """The weights in a message.

    Args:
        parts: of the message.
        values: of the same dtypes and shapes.
    """
    return [part.view(value.dtype).reshape(value.shape) for part, value in zip(parts, values, strict=True)]
