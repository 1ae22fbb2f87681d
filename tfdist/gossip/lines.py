"""Message channels between this process and others, on which messages arrive in their order."""

from __future__ import annotations

import numpy as np

from tfdist.collectives import point_to_point
from tfdist.engine.group import ProcessGroup
from tfdist.engine.pending import Pending
from tfdist.gossip.messages import GossipMessage


class MessageChannels:
    """Message channels of one optimizer.

    Args:
        group: the processes.
        name: name of the optimizer, the same on all processes.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self._group = group
        self._key = f"gossip of {name}" if group.is_world else f"gossip of {name} of {group}"  # groups share pairs
        self._expected: dict[int, Pending] = {}
        self._pairs: dict[tuple[int, int], ProcessGroup] = {}

    def _pair(self, sender: int, receiver: int) -> ProcessGroup:
        pair = sender, receiver
        if pair not in self._pairs:
            self._pairs[pair] = self._group.subgroup(pair)
        return self._pairs[pair]

    def send(self, rank: int, message: GossipMessage, overlaps: bool = True) -> None:
        """Begins to send a message, without waiting for the receiver.

        Args:
            rank: rank of the receiver.
            message: message to send, which is copied.
            overlaps: whether this process computes meanwhile; false if it waits for a message at once.
        """
        pair = self._pair(self._group.rank, rank)
        pair.post(self._key, point_to_point.send(message.packed(pair.take)), overlaps=overlaps)

    def expect(self, rank: int, overlaps: bool = True) -> None:
        """Begins to receive the next message.

        Args:
            rank: rank of the sender.
            overlaps: whether this process computes meanwhile; false if it waits at once.
        """
        if rank not in self._expected:
            pair = self._pair(rank, self._group.rank)
            near = len(set(pair.hosts)) == 1  # a message from another machine needs this process's help
            plan = point_to_point.receive(1, np.dtype(np.uint8), pair.take)
            self._expected[rank] = pair.post(self._key, plan, overlaps=overlaps, patient=near)

    def arrived(self, rank: int) -> GossipMessage | None:
        """Returns the next message if it has arrived, else None.

        Args:
            rank: rank of the sender.

        Raises:
            TfdistError: a process of the group is lost, or this job has failed.
        """
        self._group.check()
        self.expect(rank)
        if not self._expected[rank].done:
            self._group.engine.advance()
        return self.await_next(rank) if self._expected[rank].done else None

    def await_next(self, rank: int) -> GossipMessage:
        """Waits for the next message and returns it.

        Args:
            rank: rank of the sender.

        Raises:
            TfdistError: the sender is lost, or has sent nothing in time.
        """
        self.expect(rank, overlaps=False)
        pending = self._expected.pop(rank)
        return GossipMessage.unpacked(self._pair(rank, self._group.rank).wait(pending))
