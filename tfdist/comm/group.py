"""A `Communicator` among some of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.comm.communicator import Combine, Communicator, Request
from tfdist.comm.shared import SharedMemory


class GroupCommunicator:
    """A `Communicator` among some ranks of another one, which counts the messages and bytes of both.

    Args:
        whole: the other communicator; its rank is among ``members``.
        members: ranks of ``whole``; this communicator's ranks are their positions.
    """

    def __init__(self, whole: Communicator, members: Sequence[int]) -> None:
        self._whole = whole
        self._members = tuple(members)
        self.rank = self._members.index(whole.rank)
        self.size = len(self._members)
        self.hosts = tuple(whole.hosts[member] for member in self._members)
        self.segment_bytes = whole.segment_bytes

    @property
    def outlives_others(self) -> bool:
        """Whether transfers of the whole communicator still work after a rank has died."""
        return self._whole.outlives_others

    @property
    def memory(self) -> SharedMemory | None:
        """The memory that processes of this machine share, by their ranks in the whole communicator."""
        return self._whole.memory

    @property
    def messages_sent(self) -> int:
        """The number of transfers that the whole communicator has sent."""
        return self._whole.messages_sent

    @property
    def bytes_sent(self) -> int:
        """The number of bytes that the whole communicator has sent."""
        return self._whole.bytes_sent

    def send(self, buffer: np.ndarray, destination: int, tag: int) -> Request:
        """Starts to send the whole buffer to ``destination``."""
        return self._whole.send(buffer, self._members[destination], tag)

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> Request:
        """Starts to fill the whole buffer from ``source``."""
        return self._whole.receive(buffer, self._members[source], tag)

    def receive_combined(self, own: np.ndarray, target: np.ndarray, combine: Combine, source: int, tag: int) -> Request:
        """Starts to fill ``target`` with ``combine(own, received)``."""
        return self._whole.receive_combined(own, target, combine, self._members[source], tag)

    def completed(self, requests: Sequence[Any]) -> bool:
        """Returns whether all of these transfers have completed."""
        return self._whole.completed(requests)

    def progress(self) -> None:
        """Progresses transfers whose data may not have left yet."""
        self._whole.progress()

    def take(self, nbytes: int) -> np.ndarray:
        """Returns memory that is fast to send from."""
        return self._whole.take(nbytes)
