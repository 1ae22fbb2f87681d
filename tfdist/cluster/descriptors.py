"""How many files and connections a process may have open."""

from __future__ import annotations

import resource


def raised() -> int | None:
    """Raises the limit of this process to what it is allowed to allow itself.

    A server has a file for each connection, also for those of strangers that say nothing.

    Returns:
        The limit; None if there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass
    return None if soft == resource.RLIM_INFINITY else soft
