"""Whether processes get on. A deadline in seconds would have to know how fast the machine is, and what else runs on it.

A rank that waits for another takes no processor time, and one that works takes some even on a busy machine.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

STILL_SECONDS = 20.0
LEAST_PROCESSOR_TICKS = 20
"""A fifth of a second: what processes take that only nap, look after connections, and send signs of life."""


class Progress:
    """Tells when processes neither write nor compute any more.

    Args:
        pids: ids of the processes; their descendants count, too.
        written: returns how many bytes they have written.
        still: seconds without progress after which they stand still.
    """

    def __init__(self, pids: Iterable[int], written: Callable[[], int], still: float = STILL_SECONDS) -> None:
        self._pids = list(pids)
        self._written = written
        self._still = still
        self._look()

    def _look(self) -> None:
        self._since, self._state = time.monotonic(), (processor_ticks(self._pids), self._written())

    def stands_still(self) -> bool:
        """Whether nothing has got on since this was last looked at; it looks again when ``still`` seconds are over."""
        if sys.platform != "linux" or time.monotonic() - self._since < self._still:
            return False
        ticks, written = self._state
        self._look()
        return self._state[1] == written and 0 <= self._state[0] - ticks < LEAST_PROCESSOR_TICKS


def processor_ticks(pids: Iterable[int]) -> int:
    """Clock ticks that processes and those that descend from them have computed; less when one of them has ended."""
    children, ticks = defaultdict(list), {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                fields = (path / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            children[int(fields[1])].append(int(path.name))
            ticks[int(path.name)] = sum(map(int, fields[11:15]))
    pending, total = list(pids), 0
    while pending:
        pid = pending.pop()
        total += ticks.get(pid, 0)
        pending += children[pid]
    return total
