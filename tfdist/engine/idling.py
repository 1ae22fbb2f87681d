"""How a thread passes the time between two looks at transfers under way: it spins, and then it naps."""

from __future__ import annotations

import os
import time

_SPIN_SECONDS = 2e-3
_LOST_SECONDS = 3e-4
"""A thread that was off its core for so long between two looks shares it, or the GIL, with somebody."""
_CONTENDED_SECONDS = 0.2
"""How long nobody spins then, before it is tried again."""
_SHORTEST_NAP = 20e-6
_LONGEST_NAP = 3e-4
"""Short enough that a line of 1 Gbit/s is not idle while its sender naps: the kernel holds some 100 KiB for it."""


class Contention:
    """What the threads of a process have found out about their cores.

    Attributes:
        until: until when, on `time.perf_counter`, others are taken to want them.
    """

    def __init__(self) -> None:
        self.until = 0.0


class Idling:
    """One thread's wait.

    It spins for a short while after something has moved, unless others want its core or the GIL: then spinning only
    uses up its share of time, and the scheduler lets it wait for a whole tick when it is needed.

    Args:
        contention: of this process.
    """

    def __init__(self, contention: Contention) -> None:
        self._contention = contention
        self._last, self._computed = time.perf_counter(), time.thread_time()
        self.moved()

    def moved(self) -> None:
        """Something has moved: more may follow at once."""
        now = self._look()
        self._spin_until = now + _SPIN_SECONDS if now > self._contention.until else 0.0
        self._nap = _SHORTEST_NAP

    def spin(self) -> bool:
        """Lets others have the core for a moment and returns True; False when it is time to nap."""
        now = self._look()
        if now > self._spin_until or now < self._contention.until:
            return False
        os.sched_yield()
        return True

    def nap(self) -> None:
        """Sleeps, for longer from time to time."""
        time.sleep(self._nap)
        self._nap = min(2 * self._nap, _LONGEST_NAP)
        self._last, self._computed = time.perf_counter(), time.thread_time()

    def _look(self) -> float:
        now, computed = time.perf_counter(), time.thread_time()
        if (now - self._last) - (computed - self._computed) > _LOST_SECONDS:
            self._contention.until = now + _CONTENDED_SECONDS
        self._last, self._computed = now, computed
        return now
