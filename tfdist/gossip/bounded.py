"""Gossip with bounded staleness: a process mixes in the weights of its neighbours as they arrive."""

from __future__ import annotations

import numpy as np

from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.messages import GossipMessage, MessageKind
from tfdist.gossip.mixing import Arrays, Mixing, like
from tfdist.gossip.topologies import Topology


class BoundedStalenessMixing(Mixing):
    """Gossip in rounds, with neighbours' weights that are at most a number of rounds old.

    A process waits for a neighbour only if it is ahead of it by more than the bound. It adds the difference between the
    two in the neighbour's round, not that between old and new weights, which would hold training back. If that round
    is a rounds ago, the update is

        x_i ← x_i + W_ij / (1 + a) (x_j − x_i of that round).

    The later a correction, the less it counts, because late corrections overshoot: with a constant delay of a rounds
    they converge up to a factor of 2 sin(π / (4 a + 2)), which is above 1 / (1 + a). A bound of 0 is
    `SynchronousMixing`.

    Args:
        lines: message channels to the neighbours.
        topology: static topology of the processes.
        rank: rank of this process.
        size: number of processes.
        bound: maximum age of weights, in rounds.

    References:
        Luo, Lin, Zhuo and Qian, *Hop: heterogeneity-aware decentralized training*, ASPLOS 2019, for the bound; it
            averages with the old weights themselves.
    """

    def __init__(self, lines: MessageChannels, topology: Topology, rank: int, size: int, bound: int) -> None:
        super().__init__(lines, topology.neighbours(rank, size))
        self._weights = topology.sources(rank, size, 0)
        self._bound = bound
        self._last: dict[int, int] = {}
        self._own: dict[int, tuple[int, list[np.ndarray]]] = {}
        """Generation and weights of each round for which a neighbour's weights may still arrive."""

    def begin(self, values: Arrays) -> None:
        """Forgets all rounds; see `Mixing`."""
        super().begin(values)
        self._last = dict.fromkeys(self._neighbours, -1)
        self._own.clear()

    def mix(self, values: Arrays) -> list[np.ndarray]:
        """Sends this process's weights, and mixes in those that have arrived; see `Mixing`."""
        sent = [np.array(value) for value in values]
        self._own[self._round] = self._generation, sent
        message = self._message(MessageKind.WEIGHTS, sent)
        for rank in self._left:
            self._lines.send(rank, message)
        new = [value.copy() for value in sent]
        for rank in self._left:
            self._hear(rank, new)
        self._round += 1
        oldest = min((self._last[rank] for rank in self._left), default=self._round)
        for number in [number for number in self._own if number <= oldest]:
            del self._own[number]
        return new

    def _hear(self, rank: int, values: list[np.ndarray]) -> None:
        """Mixes in what has arrived from a neighbour, and waits for it as long as it is too far behind."""
        while self._last[rank] < self._round:  # later messages are of later rounds than this process's
            is_behind = self._last[rank] < self._round - self._bound
            message = self._lines.await_next(rank) if is_behind else self._lines.arrived(rank)
            if message is None:
                return
            if message.kind.is_end:
                self._has_ended(rank, message)
                return
            self._take(rank, message, values)

    def _take(self, rank: int, message: GossipMessage, values: list[np.ndarray]) -> None:
        self._last[rank] = message.round
        generation, sent = self._own.get(message.round, (-1, []))
        if not self._generation == generation == message.generation:
            return  # of a round that this process has not had, or of values that have been replaced
        age = self._round - message.round
        self.staleness[age] += 1
        weight = self._weights[rank] / (1 + age)
        for value, theirs, ours in zip(values, like(message.parts, sent), sent, strict=True):
            value += (theirs - ours) * ours.dtype.type(weight)

    def _handle_late_message(self, rank: int, message: GossipMessage, values: list[np.ndarray]) -> None:
        self._take(rank, message, values)
