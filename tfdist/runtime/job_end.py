"""Notices the end of a job, for tasks that may outlive it."""

from __future__ import annotations

import threading
import time

from tfdist.cluster.control import Watcher
from tfdist.errors import TfdistError
from tfdist.runtime.membership import Membership

_SECONDS = 3.0
"""Seconds after the end of the job in which parameter servers, which end with it, may still answer."""


class JobEnd(Watcher):
    """Notes when no training task is left.

    Args:
        member: this task's membership.

    Attributes:
        event: event that is set when no training task is left.
    """

    def __init__(self, member: Membership) -> None:
        self.event = threading.Event()
        self._at = float("inf")
        member.control.watch(self)

    def error(self) -> TfdistError | None:
        """Returns the error for waits for a parameter server; None as long as a server may answer."""
        if time.monotonic() < self._at + _SECONDS:
            return None
        return TfdistError("the job is over: its parameter servers have ended")

    def over(self) -> None:
        """Notes that no training task is left."""
        self._at = time.monotonic()
        self.event.set()
