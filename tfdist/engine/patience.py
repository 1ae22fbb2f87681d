"""What one wait tells the rendezvous server as it grows long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.cluster.control import Control
from tfdist.engine.pending import Pending

STANDING_SECONDS = 1.0
"""After so long, a rank that does nothing else than wait says so: ranks that wait for each other are told at once."""


class Patience:
    """One rank's wait for one collective.

    Args:
        control: the connection to the server; None in a world of threads.
        pending: what is waited for.
        blocking: whether this rank does nothing else meanwhile.
        stall: seconds after which everyone is told who is missing.
        counts: how many calls of each collective this rank has begun.
    """

    def __init__(
        self,
        control: Control | None,
        pending: Pending,
        blocking: bool,
        stall: float,
        counts: Callable[[], dict[str, int]],
    ) -> None:
        self._control = control
        self._pending = pending
        self._blocking = blocking
        self._stall = stall
        self._counts = counts
        self._standing = False
        self._stalls = 0

    def late(self, seconds: float) -> None:
        """Called now and then while the wait lasts, with its length so far."""
        if self._control is None:
            return
        if self._blocking and not self._standing and seconds > STANDING_SECONDS:
            self._standing = True
            message: dict[str, Any] = {"type": "standing", "counts": self._counts(), **self._pending.describe()}
            self._control.send(message)
        if seconds > (self._stalls + 1) * self._stall:
            self._stalls += 1
            self._control.send({"type": "stalled", "seconds": self._stalls * self._stall})

    def over(self) -> None:
        """The wait has ended."""
        if self._standing and self._control:
            self._control.send({"type": "moving"})
