"""Collectives that run beside the engine, of which other ranks learn through it: counts, long waits and traffic."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tfdist.engine import operations
from tfdist.engine.pending import Pending, Site

if TYPE_CHECKING:
    from tfdist.engine.engine import Engine
    from tfdist.engine.patience import WaitMonitor


class Totals(NamedTuple):
    """What has run beside the engine.

    Attributes:
        collectives: number of collectives that have begun.
        seconds: seconds in them, all of which this process has waited.
        messages: number of messages that the engine would have sent for them.
        bytes_sent: bytes that the other processes have read.
    """

    collectives: int = 0
    seconds: float = 0.0
    messages: int = 0
    bytes_sent: int = 0


def total(parts: Iterable[Totals]) -> Totals:
    """Returns the sums of several totals."""
    return Totals(*map(sum, zip(*parts, strict=True)))


class SiteBeside(Protocol):
    """A call site whose collectives run beside the engine."""

    def totals(self) -> Totals:
        """Returns the totals of the site's collectives so far."""
        ...


class Beside:
    """The collectives beside one engine.

    Args:
        engine: the engine.

    Attributes:
        sites: the call sites that have such collectives.
        waits: the calls that have waited for long.
        is_recorded: whether the engine records a timeline: 1 or 0, in memory that machine code can read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.sites: dict[Site, SiteBeside] = {}
        self.waits: list[Pending] = []
        self.is_recorded = ctypes.c_int(0)

    def calls(self, site: Site) -> int:
        """Returns the number of a site's collectives so far, of which the engine knows nothing."""
        return self.sites[site].totals().collectives if site in self.sites else 0

    def totals(self) -> Totals:
        """Returns the totals of all sites."""
        return total(site.totals() for site in self.sites.copy().values())

    def waits_for(self, site: Site, contents: str, has_order: bool = True) -> tuple[Pending, WaitMonitor | None]:
        """Begins to report the wait of the latest call of a site; returns what ends it where it is in vain.

        Args:
            site: the call site.
            contents: description of the data, for messages.
            has_order: whether this process begins no other call before this one is over.
        """
        members, key = site
        pending = Pending(key, members, contents)
        pending.operation = operations.as_operation(operations.barrier().plan)  # nobody stands in
        pending.number = self._engine.numbers.of(site)
        pending.call = self._engine.numbers.calls(site) - 1
        self.waits.append(pending)
        return pending, self._engine.monitor(pending, has_order)

    def over(self, pending: Pending) -> None:
        """Ends the report of a wait."""
        self.waits.remove(pending)
