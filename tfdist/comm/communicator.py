"""What algorithms need of whatever moves bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Request = Any
"""A transfer under way, as the Communicator that started it knows it."""


class Communicator(Protocol):
    """Point-to-point transfers among ranks 0 to ``size`` - 1, all of them non-blocking.

    Buffers are contiguous one-dimensional arrays of any dtype and must stay as they are until the transfer has
    completed. Transfers between two ranks with one tag arrive in the order in which they were started.

    Attributes:
        rank: of this process.
        size: number of processes.
        hosts: by rank, a number for the machine that it runs on.
        segment_bytes: into how large pieces transfers should be cut, the same on all ranks: few enough bytes that
            what arrives is still in the cache when it is used, and that others get their turn on a slow line;
            enough that processes which share cores need not take turns too often.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    segment_bytes: int

    @property
    def outlives_others(self) -> bool:
        """Whether transfers between other ranks go on when one dies."""
        ...

    @property
    def messages_sent(self) -> int:
        """Transfers started by ``send`` so far."""
        ...

    @property
    def bytes_sent(self) -> int:
        """Their bytes."""
        ...

    def send(self, buffer: np.ndarray, destination: int, tag: int) -> Request:
        """Starts to send the whole buffer."""
        ...

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> Request:
        """Starts to fill the whole buffer."""
        ...

    def receive_combined(
        self, own: np.ndarray, target: np.ndarray, combine: np.ufunc, source: int, tag: int
    ) -> Request:
        """Starts to fill ``target`` with ``combine(own, what arrives)``.

        Args:
            own: of the size and dtype of what arrives; only read.
            target: like ``own``, and may be it.
            combine: a NumPy ufunc of two arguments.
            source: the rank that sends.
            tag: of the transfer.
        """
        ...

    def completed(self, requests: Sequence[Request]) -> bool:
        """Whether all of these transfers have completed. Drives them on; never waits."""
        ...

    def progress(self) -> None:
        """Drives on what has completed here but may still be on its way out."""
        ...

    def take(self, nbytes: int) -> np.ndarray:
        """Uninitialized aligned memory that is quick to send from; it is used again when its last view is gone."""
        ...
