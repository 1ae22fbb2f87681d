"""Removal of the names of MPI's shared-memory segments in /dev/shm.

Once every process has attached to a segment, its name is no longer needed and could only leak: a killed process would
leave it behind, and a later job with the same name would read its contents. The memory itself lives as long as it is
mapped.
"""

from __future__ import annotations

import glob
import os

_PREFIXES = ("mpich_shm_", "mpich_vci_", "tfdist_")


def unlink_own() -> None:
    """Removes the names of the segments that this process has mapped. Call it when all processes have mapped them."""
    _unlink(_mapped("/proc/self/maps"))


def unlink_of(job: str) -> None:
    """Removes the names of all segments of a job that belong to this user.

    Call it if the job failed before `unlink_own`: a killed process cannot remove its names, but its neighbours know
    them.

    Args:
        job: the job's name, which is also the name of MPICH's key-value space.
    """
    number = _world_id(job)
    patterns = (f"mpich_shm_{number:x}_*", f"mpich_vci_{number:x}_*", f"{glob.escape(job)}_*")
    _unlink({path for pattern in patterns for path in glob.glob(f"/dev/shm/{pattern}")})


def sweep(since: float) -> None:
    """Removes the names of segments that were created since a time and that no process has mapped.

    For launchers, which do not know the job's name. A process that dies between creating a segment and removing its
    name leaves one behind.

    Args:
        since: the time, in seconds since the epoch.
    """
    segments = {path for prefix in _PREFIXES for path in glob.glob(f"/dev/shm/{prefix}*") if _made_since(path, since)}
    if segments:
        _unlink(segments - set().union(*map(_mapped, glob.glob("/proc/[0-9]*/maps"))))


def _world_id(job: str) -> int:
    """Returns MPICH's number for a job in names of segments: the FNV-1a hash of its key-value space's name."""
    number = 2166136261
    for byte in job.encode():
        number = (number ^ byte) * 16777619 & 0xFFFFFFFF
    return number


def _mapped(maps: str) -> set[str]:
    paths = tuple(f"/dev/shm/{prefix}" for prefix in _PREFIXES)
    try:
        with open(maps, encoding="utf-8", errors="replace") as lines:
            fields = [line.rstrip("\n").split(maxsplit=5) for line in lines if "/dev/shm/" in line]
    except OSError:
        return set()
    names = {field[5] for field in fields if len(field) == 6}
    return {name for name in names if name.startswith(paths) and not name.endswith("(deleted)")}


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
