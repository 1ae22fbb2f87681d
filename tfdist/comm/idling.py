"""How a thread waits between polls of running transfers: it spins first, then it sleeps."""

from __future__ import annotations

import os
import time

_SPIN_SECONDS = 2e-3
_LOST_SECONDS = 3e-4
"""Seconds off its core between two polls after which a thread is taken to share its core or the GIL with another one.
"""
_CONTENDED_SECONDS = 0.2
"""Seconds for which no thread of the process spins after such an observation."""
_SHORTEST_NAP = 20e-6
_LONGEST_NAP = 3e-4
"""Maximum nap in seconds. A link of 1 Gbit/s is not idle meanwhile, as the kernel buffers about 100 KiB for it."""
_PART_OF_WAIT = 0.01
_LONGEST_NAP_OF_LONG_WAITS = 5e-3
"""Where nothing has come for long, a nap may take a part of that time, up to a limit: a poll takes a tenth of a core
with naps of 0.3 ms, and a rank that waits for another one's trace waits for seconds."""


class Contention:
    """Whether other threads compete for a process's cores, as its waiting threads have observed.

    Attributes:
        until: the time, on `time.perf_counter`, until which the cores are assumed to be contended.
    """

    def __init__(self) -> None:
        self.until = 0.0


_of_process = Contention()


class Idling:
    """One thread's wait between polls.

    The thread spins for a short time after a transfer has progressed, unless other threads compete for its core or the
    GIL. Spinning would then only use up its time slice, and the scheduler would delay it by a whole tick when it has
    work.

    Args:
        contention: what threads have observed; by default all threads of this process.
    """

    def __init__(self, contention: Contention = _of_process) -> None:
        self._contention = contention
        self._last, self._computed = time.perf_counter(), time.thread_time()
        self.moved()

    def moved(self) -> None:
        """Begins to spin again, because a transfer has progressed and more may follow at once."""
        now = self._look()
        self._begun = now
        self._spin_until = now + _SPIN_SECONDS if now > self._contention.until else 0.0
        self._nap = _SHORTEST_NAP

    def spin(self) -> bool:
        """Yields the core briefly and returns True; returns False when it is time to sleep."""
        now = self._look()
        if now > self._spin_until or now < self._contention.until:
            return False
        os.sched_yield()
        return True

    def nap(self) -> None:
        """Sleeps; each successive sleep is longer, up to a limit."""
        time.sleep(self._nap)
        self._last, self._computed = time.perf_counter(), time.thread_time()
        longest = max(_LONGEST_NAP, min(_PART_OF_WAIT * (self._last - self._begun), _LONGEST_NAP_OF_LONG_WAITS))
        self._nap = min(2 * self._nap, longest)

    def _look(self) -> float:
        now, computed = time.perf_counter(), time.thread_time()
        if (now - self._last) - (computed - self._computed) > _LOST_SECONDS:
            self._contention.until = now + _CONTENDED_SECONDS
        self._last, self._computed = now, computed
        return now
