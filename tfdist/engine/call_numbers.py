"""Numbers of call sites, on which their members agree, and of the calls of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from tfdist.cluster.control import Control
from tfdist.cluster.messages import AgreeOnKey
from tfdist.engine.beside import Beside
from tfdist.engine.pending import Site

_OWN = -1
"""First number of sites that only this process uses, counted downwards; no message has their tags."""


class CallNumbers:
    """The call sites of a process.

    Args:
        control: this task's membership, through which members agree; None for a process alone.
        beside: the collectives that run beside the engine.
    """

    def __init__(self, control: Control | None, beside: Beside) -> None:
        self._control, self._beside = control, beside
        self._numbers: dict[Site, int] = {}
        self._posted: Counter[Site] = Counter()
        self._objects: Counter[tuple[tuple[int, ...], str]] = Counter()

    # Of sites.

    def of(self, site: Site) -> int | None:
        """Returns the number that the members have agreed on for a site; None before that."""
        return self._numbers.get(site)

    def agree(
        self, site: Site, signature: str, agreed: Callable[[int], None], refused: Callable[[str], None]
    ) -> int | None:
        """Asks for the number of a site, unless it is known or asked for; returns it, or None.

        Args:
            site: the site of a call that is not counted yet.
            signature: text that must be equal on all members.
            agreed: function of the number, called on the control connection's thread when all members have asked.
            refused: function of the reason why there will be none, called likewise.
        """
        number = self._numbers.get(site)
        if number is not None:
            return number
        members, key = site
        if self._control is None or (members is not None and len(members) == 1):
            return self._numbers.setdefault(site, _OWN - len(self._numbers))
        if not self._posted[site]:
            self._control.ask(lambda request: AgreeOnKey(request, key, signature, members), agreed, refused)
        return None

    def take(self, site: Site, number: int) -> None:
        """Takes the number that the members have agreed on for a site."""
        self._numbers[site] = number

    def name_of(self, number: int) -> str:
        """Returns the key of the site that has a number."""
        return next(key for (_, key), its_number in self._numbers.copy().items() if its_number == number)

    # Of calls.

    def begin(self, site: Site) -> None:
        """Counts a call that this process posts."""
        self._posted[site] += 1

    def withdraw(self, site: Site) -> None:
        """Counts a call less, of which nothing has been sent."""
        self._posted[site] -= 1

    def posted(self, site: Site) -> int:
        """Returns the number of calls that this process has posted."""
        return self._posted[site]

    def calls(self, site: Site) -> int:
        """Returns the number of calls that this process has posted, or that have begun beside the engine."""
        return self._posted[site] + self._beside.calls(site)

    def counts(self) -> dict[int, int]:
        """Returns the number of calls of each site, by the site's number."""
        return {number: self.calls(site) for site, number in self._numbers.copy().items()}

    # Of what is not called.

    def count(self, members: tuple[int, ...], kind: str) -> int:
        """Counts objects of a kind that the members of a group make; returns the number of earlier ones."""
        self._objects[members, kind] += 1
        return self._objects[members, kind] - 1
