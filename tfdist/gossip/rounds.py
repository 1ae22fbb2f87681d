"""Gossip in rounds: a process waits for its neighbours' weights of the same round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tfdist.gossip.encodings import Encoding
from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.messages import MessageKind
from tfdist.gossip.mixing import Arrays, Mixing, added
from tfdist.gossip.topologies import Topology


class SynchronousMixing(Mixing):
    """Mixing by decentralized parallel SGD, in synchronous rounds.

    Without overlap a process mixes the weights that its step has produced: x ← Σ_j W_ij (x_j − η g_j). With overlap the
    weights travel during the next step, and the change that mixing makes is added after it: x ← Σ_j W_ij x_j − η g_i,
    as in the paper.

    Args:
        lines: message channels to the neighbours.
        topology: topology of the processes.
        encoding: encoding of the weights.
        rank: rank of this process.
        size: number of processes.
        overlaps: whether an exchange is under way during the next step.

    References:
        Lian et al., *Can decentralized algorithms outperform centralized algorithms? A case study for decentralized
            parallel stochastic gradient descent*, NeurIPS 2017, algorithm 1.
    """

    def __init__(
        self, lines: MessageChannels, topology: Topology, encoding: Encoding, rank: int, size: int, overlaps: bool
    ) -> None:
        super().__init__(lines, topology.neighbours(rank, size))
        self._topology, self._encoding = topology, encoding
        self._place = rank, size
        self._overlaps = overlaps
        self._under_way: dict[int, float] | None = None
        self._assigned: set[int] = set()

    def begin(self, values: Arrays) -> None:
        """Drops the exchange under way, and resets the encoding; see `Mixing`."""
        super().begin(values)
        self._under_way = None
        self._encoding.begin(values, self._neighbours)

    def mix(self, values: Arrays) -> list[np.ndarray]:
        """Completes this round's exchange, or with overlap the last one's; see `Mixing`."""
        if not self._overlaps:
            self._start(values)
            return self._completed(values)
        new = self._completed(values)
        self._start(new)
        return [value.copy() for value in new]  # the originals are being sent

    def finish(self, values: Arrays) -> list[np.ndarray]:
        """Completes the exchange under way, then ends the rounds; see `Mixing`."""
        return super().finish(self._completed(values))

    def assigned(self, place: int) -> None:
        """Excludes the variable from the exchange under way; see `Mixing`."""
        super().assigned(place)
        self._assigned.add(place)

    def _start(self, values: Arrays) -> None:
        message = self._message(MessageKind.WEIGHTS, self._encoding.sent(values))
        self._under_way = self._topology.sources(*self._place, self._round)
        awaited = self._under_way.keys() - self._ended
        overlaps = self._overlaps or not awaited  # a message that no wait follows is sent beside the next step
        for rank in self._topology.targets(*self._place, self._round):
            if rank not in self._ended:
                self._lines.send(rank, message, overlaps)
        for rank in awaited:
            self._lines.expect(rank, overlaps)
        self._assigned.clear()
        self._round += 1

    def _completed(self, values: Arrays) -> list[np.ndarray]:
        """Returns the weights after the exchange under way. Neighbours that have ended count as having this one's."""
        if self._under_way is None:
            return [np.array(value) for value in values]
        sources, self._under_way = self._under_way, None
        for rank in sources.keys() - self._ended:
            message = self._lines.await_next(rank)
            if message.kind.is_end:
                self._has_ended(rank, message)
            else:
                self._encoding.received(rank, message.parts)
        weights = {rank: weight for rank, weight in sources.items() if rank not in self._ended}
        self.staleness[int(self._overlaps)] += len(weights)
        changes: Sequence[np.ndarray] = self._encoding.change(weights)
        if self._assigned:
            changes = [
                np.zeros_like(change) if place in self._assigned else change for place, change in enumerate(changes)
            ]
        return added(values, changes)
