"""Gossip in pairs, whenever both processes are ready; no process waits for another."""

from __future__ import annotations

import numpy as np

from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.messages import GossipMessage, MessageKind
from tfdist.gossip.mixing import Arrays, Mixing, added, like
from tfdist.gossip.topologies import Topology


class PairwiseMixing(Mixing):
    """Mixing by asynchronous decentralized parallel SGD.

    In each turn a process answers the requests that have arrived, adds the answer to its own request if it has arrived,
    and sends a request to a random neighbour if none is pending. A request holds the weights a of its sender. The
    receiver, which has the weights b, answers with (b − a) / 2. It subtracts this from its own weights, and the sender
    adds it to its own. So the sum of all weights stays constant, even if weights have changed in the meantime; if they
    have not, both processes get their average. If two processes have sent each other requests at the same time, each
    adds half the difference between the weights that were sent.

    In the paper a process waits for the answer, and the processes are divided into those that ask and those that
    answer, so that they do not wait for each other in a circle. Here a process trains while it waits. An answer is late
    by the time that the other process takes for a step, and any graph may be used.

    Args:
        lines: message channels to the neighbours.
        topology: topology of the processes, whose weights are the odds of drawing a neighbour.
        rank: rank of this process.
        size: number of processes.

    References:
        Lian, Zhang, Zhang and Liu, *Asynchronous decentralized parallel stochastic gradient descent*, ICML 2018.
    """

    def __init__(self, lines: MessageChannels, topology: Topology, rank: int, size: int) -> None:
        self._weights = topology.neighbours(rank, size)
        super().__init__(lines, self._weights)
        self._draws = np.random.default_rng([rank, size])
        self._asked: int | None = None
        self._given: list[np.ndarray] = []
        self._given_at = self._given_in = 0

    def begin(self, values: Arrays) -> None:
        """Forgets the last request; see `Mixing`."""
        super().begin(values)
        self._asked = None

    def mix(self, values: Arrays) -> list[np.ndarray]:
        """Answers requests, adds the answer that has arrived, and sends a request; see `Mixing`."""
        new = [np.array(value) for value in values]
        for rank in self._left:
            while rank not in self._ended and (message := self._lines.arrived(rank)) is not None:
                if message.kind == MessageKind.REQUEST and rank != self._asked:
                    self._answer(rank, message, new)
                else:
                    self._hear(rank, message, new)
        if self._asked is None and self._left:
            self._ask(new)
        self._round += 1
        return new

    def _handle_late_message(self, rank: int, message: GossipMessage, values: list[np.ndarray]) -> None:
        # A request counts only if it crossed this process's own. Otherwise its sender drops it when it hears that this
        # process has ended.
        self._hear(rank, message, values)

    def _ask(self, values: list[np.ndarray]) -> None:
        chances = np.array([self._weights[rank] for rank in self._left])
        self._asked = int(self._draws.choice(self._left, p=chances / chances.sum()))
        self._given = [value.copy() for value in values]
        self._given_at, self._given_in = self._round, self._generation
        self._lines.send(self._asked, self._message(MessageKind.REQUEST, self._given))

    def _answer(self, rank: int, request: GossipMessage, values: list[np.ndarray]) -> None:
        if request.generation != self._generation:  # the program has since assigned values in one of the two
            self._lines.send(rank, self._message(MessageKind.DECLINED))
            return
        halves = _halves(values, like(request.parts, values))
        self._lines.send(rank, self._message(MessageKind.ANSWER, halves))
        for value, half in zip(values, halves, strict=True):
            value -= half

    def _hear(self, rank: int, message: GossipMessage, values: list[np.ndarray]) -> None:
        if rank == self._asked:
            self._asked = None
            if self._given_in == self._generation:
                self._add(message, values)
        if message.kind.is_end:
            self._has_ended(rank, message)

    def _add(self, message: GossipMessage, values: list[np.ndarray]) -> None:
        if message.kind == MessageKind.ANSWER:
            changes = like(message.parts, values)
        elif message.kind == MessageKind.REQUEST and message.generation == self._given_in:
            changes = _halves(like(message.parts, values), self._given)
        else:
            return
        self.staleness[self._round - self._given_at] += 1
        values[:] = added(values, changes)


def _halves(ones: Arrays, others: Arrays) -> list[np.ndarray]:
    """Returns (one − other) / 2 for each pair of arrays."""
    return [np.asarray((one - other) * one.dtype.type(0.5)) for one, other in zip(ones, others, strict=True)]
