"""Collectives that run beside the engine, of which other ranks learn through it: counts, long waits and traffic."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tfdist.engine import operations
from tfdist.engine.pending import Pending, Site

if TYPE_CHECKING:
    from tfdist.engine.engine import Engine
    from tfdist.engine.patience import WaitMonitor


class Totals(NamedTuple):
    """What has run beside the engine since this process started.

    Attributes:
        collectives: number of collectives.
        seconds: seconds in them, all of which this process has waited.
        messages: number of messages that the engine would have sent for them.
        bytes_sent: bytes that the other processes have read.
    """

    collectives: int = 0
    seconds: float = 0.0
    messages: int = 0
    bytes_sent: int = 0


class Beside:
    """The collectives beside one engine.

    Args:
        engine: the engine.

    Attributes:
        sites: the call sites that have such collectives.
        counts: by call site, a function that returns the number of its collectives so far, of which the engine knows
            nothing.
        waits: the calls that have waited for long.
        totals: function that returns the totals.
        is_recorded: whether the engine records a timeline: 1 or 0, in memory that machine code can read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sites: dict[Site, Any] = {}
        self.counts: dict[Site, Callable[[], int]] = {}
        self.waits: list[Pending] = []
        self.totals: Callable[[], Totals] = Totals
        self.is_recorded = ctypes.c_int(0)

    def waits_for(self, site: Site, contents: str) -> tuple[Pending, WaitMonitor | None]:
        """Begins to report the wait of the latest call of a site; returns what ends it where it is in vain.

        Args:
            site: the call site.
            contents: description of the data, for messages.
        """
        members, key = site
        pending = Pending(key, members, contents)
        pending.operation = operations.as_operation(operations.barrier().plan)  # nobody stands in
        pending.number = self._engine.number(site)
        pending.call = self._engine.calls(site) - 1
        self.waits.append(pending)
        return pending, self._engine.monitor(pending)

    def over(self, pending: Pending) -> None:
        """Ends the report of a wait."""
        self.waits.remove(pending)
