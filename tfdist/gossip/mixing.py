"""Base of the ways in which a process mixes its weights with those of its neighbours."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.messages import GossipMessage, MessageKind
from tfdist.local_sgd.course import StopRequests

Arrays = Sequence[np.ndarray]


class Mixing(abc.ABC):
    """Mixing of one optimizer's weights with those of neighbours.

    A process that has taken its steps tells all its neighbours, and receives what they have still sent. They continue
    without it. If it has ended because a process requests that all stop, they end after that round, and pass the
    request on.

    Args:
        lines: message channels to the neighbours.
        neighbours: ranks of the neighbours.

    Attributes:
        wishes: requests that all take no more steps, of this process and those it has heard of.
        staleness: how often weights of each age, in rounds, have been mixed in.
    """

    def __init__(self, lines: MessageChannels, neighbours: Iterable[int]) -> None:
        self.wishes = StopRequests()
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
        """Begins the rounds anew, after `finish` or at first.

        Args:
            values: the weights, equal on all processes.
        """
        self._ended.clear()
        self._stops = False
        self._round = self._generation = 0

    @abc.abstractmethod
    def mix(self, values: Arrays) -> list[np.ndarray]:
        """Mixes this process's weights with those of neighbours, in one round.

        Args:
            values: weights of this process; only read.

        Returns:
            The new weights, in arrays of their own.
        """

    def finish(self, values: Arrays) -> list[np.ndarray]:
        """Ends the rounds, and waits until all neighbours have ended. All processes call it.

        Args:
            values: weights of this process; only read.

        Returns:
            The new weights, in arrays of their own.
        """
        end = MessageKind.STOPPED if self._stops or self.wishes.own() else MessageKind.ENDED
        for rank in self._neighbours:
            self._lines.send(rank, self._message(end))
        new = [np.array(value) for value in values]
        for rank in self._left:
            while not (message := self._lines.await_next(rank)).kind.is_end:
                self._handle_late_message(rank, message, new)
        return new

    def _has_ended(self, rank: int, message: GossipMessage) -> None:
        """Notes that a neighbour has ended while this process takes steps."""
        self._ended.add(rank)
        if message.kind == MessageKind.STOPPED:
            self._stops = True
            self.wishes.learn(1)

    def _handle_late_message(self, rank: int, message: GossipMessage, values: list[np.ndarray]) -> None:
        """Handles what a neighbour sent before its end, after this process has ended; may change the weights."""
        return

    def assigned(self, place: int) -> None:
        """Notes an assignment by the user's program; what others have sent before no longer applies to the variable.

        Args:
            place: index of the variable.
        """
        self._generation += 1

    def _message(self, kind: MessageKind, parts: Sequence[np.ndarray] = ()) -> GossipMessage:
        return GossipMessage(kind, self._round, self._generation, parts)


def added(values: Arrays, changes: Arrays) -> list[np.ndarray]:
    """Returns sums in arrays of their own.

    Args:
        values: some arrays.
        changes: one array to add to each of them.
    """
    return [np.asarray(value + change) for value, change in zip(values, changes, strict=True)]


def like(parts: Arrays, values: Arrays) -> list[np.ndarray]:
    """Returns the weights that a message holds.

    Args:
        parts: parts of the message.
        values: arrays with the dtypes and shapes of the weights.
    """
    return [part.view(value.dtype).reshape(value.shape) for part, value in zip(parts, values, strict=True)]
