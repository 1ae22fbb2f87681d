"""Gossip in pairs, whenever both come to it; nobody waits for anybody."""

from __future__ import annotations

import numpy as np

from tfdist.gossip.lines import Lines
from tfdist.gossip.messages import Kind, Message
from tfdist.gossip.mixing import Arrays, Mixing, added, like
from tfdist.gossip.topologies import Topology


class InPairs(Mixing):
    """Asynchronous decentralized parallel SGD.

    In its turn a process answers the requests that have come, adds the answer to its own, if it has come, and then
    makes another request, to a neighbour that it draws. A request brings the weights a of its sender. Its receiver,
    with the weights b, answers with (b − a) / 2, which it takes from its own weights and the sender adds to its own.
    So the sum of all weights stays what it is, whatever has changed in the meantime; it is the average of the two if
    nothing has. If two processes have sent each other requests at the same time, each adds half the difference between
    what was sent.

    Where the paper lets a process wait for the answer, and divides the processes into some that ask and some that
    answer, so that they do not wait for each other in a circle, here it trains on: the answer is late by the time that
    the other one takes for a step, and any graph will do.

    Args:
        lines: as of `Mixing`.
        topology: of the processes; neighbours are drawn by their weights.
        rank: of this process.
        size: how many there are.

    References:
        Lian, Zhang, Zhang and Liu, *Asynchronous decentralized parallel stochastic gradient descent*, ICML 2018.
    """

    def __init__(self, lines: Lines, topology: Topology, rank: int, size: int) -> None:
        self._weights = topology.neighbours(rank, size)
        super().__init__(lines, self._weights)
        self._draws = np.random.default_rng([rank, size])
        self._asked: int | None = None
        self._given: list[np.ndarray] = []
        self._given_at = self._given_in = 0

    def begin(self, values: Arrays) -> None:
        """See `Mixing`."""
        super().begin(values)
        self._asked = None

    def mix(self, values: Arrays) -> list[np.ndarray]:
        """See `Mixing`."""
        new = [np.array(value) for value in values]
        for rank in self._left:
            while rank not in self._ended and (message := self._lines.arrived(rank)) is not None:
                if message.kind == Kind.REQUEST and rank != self._asked:
                    self._answer(rank, message, new)
                else:
                    self._hear(rank, message, new)
        if self._asked is None and self._left:
            self._ask(new)
        self._round += 1
        return new

    def _heard_at_the_end(self, rank: int, message: Message, values: list[np.ndarray]) -> None:
        # A request that was not made at the same time as this one's own is void, as its sender knows when it hears
        # that this process has ended.
        self._hear(rank, message, values)

    def _ask(self, values: list[np.ndarray]) -> None:
        chances = np.array([self._weights[rank] for rank in self._left])
        self._asked = int(self._draws.choice(self._left, p=chances / chances.sum()))
        self._given = [value.copy() for value in values]
        self._given_at, self._given_in = self._round, self._generation
        self._lines.send(self._asked, self._message(Kind.REQUEST, self._given))

    def _answer(self, rank: int, request: Message, values: list[np.ndarray]) -> None:
        if request.generation != self._generation:  # one of the two has values that the program has assigned since
            self._lines.send(rank, self._message(Kind.DECLINED))
            return
        halves = _halves(values, like(request.parts, values))
        self._lines.send(rank, self._message(Kind.ANSWER, halves))
        for value, half in zip(values, halves, strict=True):
            value -= half

    def _hear(self, rank: int, message: Message, values: list[np.ndarray]) -> None:
        if rank == self._asked:
            self._asked = None
            if self._given_in == self._generation:
                self._add(message, values)
        if message.kind.is_end:
            self._has_ended(rank, message)

    def _add(self, message: Message, values: list[np.ndarray]) -> None:
        if message.kind == Kind.ANSWER:
            changes = like(message.parts, values)
        elif message.kind == Kind.REQUEST and message.generation == self._given_in:
            changes = _halves(like(message.parts, values), self._given)
        else:
            return
        self.staleness[self._round - self._given_at] += 1
        values[:] = added(values, changes)


def _halves(ones: Arrays, others: Arrays) -> list[np.ndarray]:
    """(one − other) / 2 of each."""
    return [np.asarray((one - other) * one.dtype.type(0.5)) for one, other in zip(ones, others, strict=True)]
