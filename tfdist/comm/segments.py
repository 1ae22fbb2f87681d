"""MPI's shared-memory segments in /dev/shm: their names are removed as soon as nobody needs them any more.

Once every process has attached to a segment its name is only a way to leak it: a killed process would leave it
behind, and a later job that happens on the name reads what it finds there. The memory itself lives as long as it is
mapped.
"""

from __future__ import annotations

import glob
import os

_PATTERN = "/dev/shm/mpich_shm_*"


def unlink_own() -> None:
    """Removes the names of the segments that this process has mapped; to be called when all have."""
    _unlink(_mapped("/proc/self/maps"))


def sweep(since: float) -> None:
    """Removes the names of segments that were made since a time and that no process has mapped.

    A process that dies between the making of a segment and the removal of its name leaves one.

    Args:
        since: seconds since the epoch.
    """
    segments = {path for path in glob.glob(_PATTERN) if _made_since(path, since)}
    if segments:
        _unlink(segments - set().union(*map(_mapped, glob.glob("/proc/[0-9]*/maps"))))


def _mapped(maps: str) -> set[str]:
    try:
        with open(maps, encoding="utf-8", errors="replace") as lines:
            return {line.split()[5] for line in lines if "/dev/shm/mpich_shm_" in line and "(deleted)" not in line}
    except OSError:
        return set()


def _made_since(path: str, since: float) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return False
    return status.st_uid == os.getuid() and status.st_ctime >= since - 1.0


def _unlink(paths: set[str]) -> None:
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            pass
