"""Transfers between threads of one process, for tests and for simulating many ranks."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.comm.communicator import Combine
from tfdist.comm.shared import SharedMemory

Channel = tuple[int, int, int]
"""Source, destination and tag of transfers."""


class _LocalTransfer:
    def __init__(self, buffer: np.ndarray, then: Callable[[], Any] | None = None) -> None:
        self.buffer = buffer
        self.then = then
        self.done = False


class LocalWorld:
    """The mailboxes shared by the communicators of a simulated world.

    Args:
        size: the number of ranks.
        hosts: by rank, the number of its simulated machine; by default all are on the same one.
        segment_bytes: size of the pieces that transfers are cut into; see `tfdist.comm.communicator.Communicator`.
    """

    def __init__(self, size: int, hosts: Sequence[int] | None = None, segment_bytes: int = 1 << 20) -> None:
        self.size = size
        self.hosts = tuple(hosts) if hosts is not None else (0,) * size
        self.segment_bytes = segment_bytes
        self._lock = threading.Lock()
        self._sent: dict[Channel, deque[_LocalTransfer]] = defaultdict(deque)
        self._awaited: dict[Channel, deque[_LocalTransfer]] = defaultdict(deque)

    def communicator(self, rank: int) -> LocalCommunicator:
        """Returns the communicator of one rank."""
        return LocalCommunicator(self, rank)

    def _match(self, channel: Channel, transfer: _LocalTransfer, sending: bool) -> None:
        own, other = (self._sent, self._awaited) if sending else (self._awaited, self._sent)
        with self._lock:
            if not other[channel]:
                own[channel].append(transfer)
                return
            partner = other[channel].popleft()
            source, target = (transfer, partner) if sending else (partner, transfer)
            target.buffer[...] = source.buffer
            if target.then:
                target.then()
            source.done = target.done = True


class LocalCommunicator:
    """A `Communicator` between threads.

    Args:
        world: the world shared by all ranks.
        rank: this communicator's rank.
    """

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.size = world.size
        self.hosts = world.hosts
        self.segment_bytes = world.segment_bytes
        self.outlives_others = True
        self.memory: SharedMemory | None = None
        self.messages_sent = 0
        self.bytes_sent = 0
        self.tags = 1 << 28

    def send(self, buffer: np.ndarray, destination: int, tag: int) -> _LocalTransfer:
        """Starts to send the whole buffer to ``destination``."""
        self.messages_sent += 1
        self.bytes_sent += buffer.nbytes
        transfer = _LocalTransfer(buffer)
        self._world._match((self.rank, destination, tag), transfer, sending=True)
        return transfer

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> _LocalTransfer:
        """Starts to fill the whole buffer from ``source``."""
        transfer = _LocalTransfer(buffer)
        self._world._match((source, self.rank, tag), transfer, sending=False)
        return transfer

    def receive_combined(
        self, own: np.ndarray, target: np.ndarray, combine: Combine, source: int, tag: int
    ) -> _LocalTransfer:
        """Starts to fill ``target`` with ``combine(own, received)``."""
        landing = np.empty_like(own)
        transfer = _LocalTransfer(landing, lambda: combine(own, landing, out=target))
        self._world._match((source, self.rank, tag), transfer, sending=False)
        return transfer

    def completed(self, requests: Sequence[_LocalTransfer]) -> bool:
        """Returns whether all of these transfers have completed."""
        return all(request.done for request in requests)

    def progress(self) -> None:
        """Does nothing, as nothing is buffered."""

    def take(self, nbytes: int) -> np.ndarray:
        """Returns ordinary memory, without a pool."""
        return np.empty(nbytes, np.uint8)
