"""Lines between this process and others, along which messages arrive in their order."""

from __future__ import annotations

import numpy as np

from tfdist.collectives import point_to_point
from tfdist.engine.group import Group
from tfdist.engine.pending import Pending
from tfdist.gossip.messages import Message


class Lines:
    """Of one optimizer.

    Args:
        group: the processes.
        name: of the optimizer, the same on all of them.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._key = f"gossip of {name}" if group.is_world else f"gossip of {name} of {group}"  # pairs are of all groups
        self._expected: dict[int, Pending] = {}

    def send(self, rank: int, message: Message) -> None:
        """Begins to send; nobody waits for the receiver.

        Args:
            rank: of the receiver.
            message: of which this takes a copy.
        """
        pair = self._group.subgroup((self._group.rank, rank))
        pair.post(self._key, point_to_point.send(message.packed(pair.take)))

    def expect(self, rank: int) -> None:
        """Begins to receive the next message, which may come while this process computes.

        Args:
            rank: of the sender.
        """
        if rank not in self._expected:
            pair = self._group.subgroup((rank, self._group.rank))
            near = len(set(pair.hosts)) == 1  # what comes from another machine needs this one's hands
            plan = point_to_point.receive(1, np.dtype(np.uint8), pair.take)
            self._expected[rank] = pair.post(self._key, plan, patient=near)

    def arrived(self, rank: int) -> Message | None:
        """The next message, if it has come.

        Args:
            rank: of the sender.

        Raises:
            TfdistError: a process of the group is lost, or this job has failed.
        """
        self._group.check()
        self.expect(rank)
        if not self._expected[rank].done:
            self._group.engine.advance()
        return self.await_next(rank) if self._expected[rank].done else None

    def await_next(self, rank: int, blocking: bool = False) -> Message:
        """Waits for the next message.

        Args:
            rank: of the sender.
            blocking: as of `tfdist.engine.engine.Engine.wait`.

        Raises:
            TfdistError: the sender is lost, or did not come in time.
        """
        self.expect(rank)
        pair = self._group.subgroup((rank, self._group.rank))
        return Message.unpacked(pair.wait(self._expected.pop(rank), blocking))
