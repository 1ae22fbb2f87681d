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
        messages_sent: transfers started by ``send`` so far.
        bytes_sent: their bytes.
    """

    rank: int
    size: int
    messages_sent: int
    bytes_sent: int

    def send(self, buffer: np.ndarray, destination: int, tag: int) -> Request:
        """Starts to send the whole buffer."""
        ...

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> Request:
        """Starts to fill the whole buffer."""
        ...

    def completed(self, requests: Sequence[Request]) -> bool:
        """Whether all of these transfers have completed. Drives them on; never waits."""
        ...

    def progress(self) -> None:
        """Drives on what has completed here but may still be on its way out."""
        ...
