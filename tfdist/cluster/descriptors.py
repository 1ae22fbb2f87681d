"""Raises the number of files and connections that this process may have open."""

from __future__ import annotations

import resource


def raise_file_limit() -> int | None:
    """Raises this process's limit of open files to the hard limit.

    A server needs a file descriptor for each connection, also for those of unknown processes that send nothing.

    Returns:
        The limit; None if it is unlimited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass
    return None if soft == resource.RLIM_INFINITY else soft
