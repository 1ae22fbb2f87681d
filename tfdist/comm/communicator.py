"""The interface through which algorithms transfer bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from tfdist.comm.shared import SharedMemory

Request = Any
"""A running transfer; opaque except to the `Communicator` that started it."""

Combine = Callable[..., Any]
"""A NumPy ufunc of two arguments, or a function that is called like one, with ``out``."""


class Communicator(Protocol):
    """Non-blocking point-to-point transfers among ranks 0 to ``size`` - 1.

    Buffers are contiguous one-dimensional arrays of any dtype and must not change until the transfer has completed.
    Transfers between two ranks with the same tag arrive in the order in which they were started.

    Attributes:
        rank: this process's rank.
        size: the number of processes.
        hosts: by rank, the number of its machine.
        segment_bytes: the size of the pieces that transfers should be cut into, the same on all ranks. Small enough
            that received data is still in the cache when it is used, and that other transfers get their turn on a slow
            link; large enough that processes that share cores do not switch too often.
    """

    rank: int
    size: int
    hosts: tuple[int, ...]
    segment_bytes: int

    @property
    def outlives_others(self) -> bool:
        """Whether transfers between the other ranks still work after a rank has died."""
        ...

    @property
    def memory(self) -> SharedMemory | None:
        """The memory that processes of this machine share; None if no memory of this process can be read."""
        ...

    @property
    def messages_sent(self) -> int:
        """The number of transfers started by ``send``."""
        ...

    @property
    def bytes_sent(self) -> int:
        """The bytes of the transfers started by ``send``."""
        ...

    def send(self, buffer: np.ndarray, destination: int, tag: int) -> Request:
        """Starts to send the whole buffer."""
        ...

    def receive(self, buffer: np.ndarray, source: int, tag: int) -> Request:
        """Starts to fill the whole buffer."""
        ...

    def receive_combined(self, own: np.ndarray, target: np.ndarray, combine: Combine, source: int, tag: int) -> Request:
        """Starts to fill ``target`` with ``combine(own, received)``.

        Args:
            own: an array of the size and dtype of the received data; only read.
            target: an array like ``own``, or ``own`` itself.
            combine: combines two arrays into a third one, which may be the first.
            source: the rank that sends.
            tag: the transfer's tag.
        """
        ...

    def completed(self, requests: Sequence[Request]) -> bool:
        """Returns whether all of these transfers have completed. Progresses them; never waits."""
        ...

    def progress(self) -> None:
        """Progresses transfers that have completed here but whose data may not have left yet."""
        ...

    def take(self, nbytes: int) -> np.ndarray:
        """Returns uninitialized aligned memory, fast to send from, which is reused when its last view is deleted."""
        ...
