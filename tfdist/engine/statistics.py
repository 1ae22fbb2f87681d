"""Measures how much and how long a process has communicated, and how much of that time it has waited."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tfdist.comm.communicator import Communicator
    from tfdist.engine.beside import Beside


class Statistics:
    """Counters that only grow; subtract two readings to measure an interval.

    Args:
        communicator: what the engine sends with.
        beside: the collectives beside the engine.

    Attributes:
        begun: number of collectives that the engine has begun.
        communicating: runs while at least one of the engine's collectives does.
        waiting: runs while at least one thread waits for a collective of the engine.
    """

    def __init__(self, communicator: Communicator, beside: Beside) -> None:
        self._communicator, self._beside = communicator, beside
        self.begun = 0
        self.communicating = _Stopwatch()
        self.waiting = _Stopwatch()

    @property
    def collectives(self) -> int:
        """Number of collectives begun."""
        return self.begun + self._beside.totals().collectives

    @property
    def messages_sent(self) -> int:
        """Number of messages sent."""
        return self._communicator.messages_sent + self._beside.totals().messages

    @property
    def bytes_sent(self) -> int:
        """Bytes sent to other processes, or read by them."""
        return self._communicator.bytes_sent + self._beside.totals().bytes_sent

    @property
    def communicating_seconds(self) -> float:
        """Seconds in which at least one collective was running."""
        return self.communicating.seconds() + self._beside.totals().seconds

    @property
    def waiting_seconds(self) -> float:
        """Seconds in which at least one thread was waiting for a collective, without overlap with computation."""
        return self.waiting.seconds() + self._beside.totals().seconds


class _Stopwatch:
    def __init__(self) -> None:
        self._total = 0.0
        self._since: float | None = None

    def start(self) -> None:
        self._since = time.perf_counter()

    def stop(self) -> None:
        if self._since is not None:
            self._total += time.perf_counter() - self._since
            self._since = None

    def seconds(self) -> float:
        since = self._since
        return self._total + (time.perf_counter() - since if since is not None else 0.0)
