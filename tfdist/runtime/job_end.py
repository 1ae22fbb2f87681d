"""The end of a job, for tasks that outlive it."""

from __future__ import annotations

import threading
import time

from tfdist.errors import TfdistError
from tfdist.runtime.membership import Membership

_SECONDS = 3.0
"""Servers end with the job; who is not answered for so long after that need not wait any more."""


class JobEnd:
    """Notes when no task is left that trains; a `tfdist.cluster.control.Watcher`.

    Args:
        member: this task's membership.

    Attributes:
        event: set then.
    """

    def __init__(self, member: Membership) -> None:
        self.event = threading.Event()
        self._at = float("inf")
        member.control.watch(self)

    def error(self) -> TfdistError | None:
        """Why nobody needs to wait for a server any more; None as long as it may answer."""
        if time.monotonic() < self._at + _SECONDS:
            return None
        return TfdistError("the job is over: its parameter servers have ended")

    def lost(self, task: int, error: TfdistError) -> None:
        """Means nothing: others may still train."""

    def came(self, task: int) -> None:
        """Means nothing."""

    def left(self, task: int) -> None:
        """Means nothing: others may still train."""

    def over(self) -> None:
        """No training task is left."""
        self._at = time.monotonic()
        self.event.set()
