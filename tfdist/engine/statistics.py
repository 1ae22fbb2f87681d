"""How much a process has communicated, and how much of that time it spent waiting."""

from __future__ import annotations

import time


class Statistics:
    """Counts that only grow; compare two readings for what happened between them.

    Attributes:
        collectives: how many have been begun.
    """

    def __init__(self) -> None:
        self.collectives = 0
        self._communicating = _Stopwatch()
        self._waiting = _Stopwatch()

    @property
    def communicating_seconds(self) -> float:
        """How long at least one collective has been under way."""
        return self._communicating.seconds()

    @property
    def waiting_seconds(self) -> float:
        """How long at least one thread has waited for a collective: the part that is not hidden behind computing."""
        return self._waiting.seconds()

    def begin_communicating(self) -> None:
        """A collective was posted while none was under way."""
        self._communicating.start()

    def end_communicating(self) -> None:
        """The last collective under way is complete."""
        self._communicating.stop()

    def begin_waiting(self) -> None:
        """A thread waits, and no other did."""
        self._waiting.start()

    def end_waiting(self) -> None:
        """No thread waits any more."""
        self._waiting.stop()


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
