"""The rendezvous server's knowledge of collectives: their numbers, the ranks that stand still, and those that joined.

Ranks send messages about collectives only in rare cases: at the first use of a key, when a wait has become long, and
when a rank has no more data. All other collectives involve the ranks alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tfdist.cluster.messages import (
    AgreeOnKey,
    AllJoined,
    CollectiveCall,
    Invite,
    Invited,
    Join,
    RankJoined,
    RankStatus,
    RendezvousMessage,
    Reply,
    Resumed,
    StallReport,
    StatusRequest,
    WaitingForCall,
)

_OTHERS_SECONDS = 5.0
"""Seconds for the rest of a group to come too, when some of its ranks wait for each other in calls that can be undone.
"""

Site = tuple[tuple[int, ...] | None, str]
"""The members of a group (None for all ranks), and the key of a collective in it."""


@dataclass
class Agreement:
    """The number of a key, and the ranks that have asked for it.

    Attributes:
        number: number of the key; the members learn it once all have asked.
        members: ranks that have to ask.
        signatures: descriptions of the call, by rank; they must be equal.
        asked: ids of the requests that are not answered yet, by rank.
    """

    number: int
    members: frozenset[int]
    signatures: dict[int, str] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)


def _named(call: CollectiveCall | AgreeOnKey) -> str:
    return call.key if call.members is None else f"{call.key} in group {list(call.members)}"


def _site(call: CollectiveCall | AgreeOnKey) -> Site:
    return call.members, call.key


class CollectiveCoordinator:
    """The server's bookkeeping of collectives; it has no connection of its own.

    Args:
        size: number of ranks.
        name: function that returns a rank's name for messages.
        tell: function that sends a message to a rank.
        fail: function that reports that ranks do different things, with the reason and the members of the group.
        later: function that calls back after some seconds.
    """

    def __init__(
        self,
        size: int,
        name: Callable[[int], str],
        tell: Callable[[int, RendezvousMessage], None],
        fail: Callable[[str, tuple[int, ...] | None], None],
        later: Callable[[float, Callable[[], None]], Any],
    ) -> None:
        self._everyone = frozenset(range(size))
        self._name = name
        self._tell = tell
        self._fail = fail
        self._later = later
        self._numbers = itertools.count()
        self._agreements: dict[Site, Agreement] = {}
        self._standing: dict[int, WaitingForCall] = {}
        self._joined: dict[int, dict[int, int]] = {}
        self._reports: dict[int, RankStatus] = {}

    def heard(self, rank: int, message: AgreeOnKey | WaitingForCall | Resumed | Join | Invite | RankStatus) -> None:
        """Handles a rank's message."""
        match message:
            case AgreeOnKey():
                self._agree(rank, message)
            case WaitingForCall():
                self._stands(rank, message)
            case Resumed():
                self._standing.pop(rank, None)
            case Join():
                self._join(rank, message.counts)
            case Invite():
                for target in message.to:
                    self._tell(target, Invited(message.call, message.stand_in))
            case RankStatus():
                self._reports[rank] = message

    def _ranks(self, members: tuple[int, ...] | None) -> frozenset[int]:
        return self._everyone if members is None else frozenset(members)

    # The numbers of keys.

    def _agree(self, rank: int, message: AgreeOnKey) -> None:
        agreement = self._agreements.get(_site(message))
        if agreement is None:
            agreement = Agreement(next(self._numbers), self._ranks(message.members))
            self._agreements[_site(message)] = agreement
        for other, theirs in agreement.signatures.items():
            if theirs != message.signature:
                self._fail(
                    f"ranks differ in {_named(message)}: rank {other} has {theirs}, rank {rank} has "
                    f"{message.signature}. Every rank must build the same model and take the same steps.",
                    message.members,
                )
                return
        agreement.signatures[rank] = message.signature
        agreement.asked[rank] = message.id
        self._settle(agreement)

    def _settle(self, agreement: Agreement) -> None:
        """Answers the ranks that asked, once no member is missing."""
        if not agreement.asked or agreement.members - set(agreement.asked) - set(self._joined):
            return
        for rank, request in agreement.asked.items():
            self._tell(rank, Reply(request, agreement.number))
        agreement.asked.clear()
        agreement.signatures.clear()

    # Ranks that wait for each other.

    def _stands(self, rank: int, message: WaitingForCall) -> None:
        self._standing[rank] = message
        circle = self._circle(rank)
        if circle and self._can_be_undone(circle):
            if self._can_be_undone(self._ranks(message.call.members)):
                self._undo(self._ranks(message.call.members))
            else:
                self._later(_OTHERS_SECONDS, lambda: self._end(self._circle(rank)))
        else:
            self._end(circle)

    def _end(self, circle: list[int]) -> None:
        """Reports a failure if ranks wait for each other in a circle."""
        if circle:
            members = {self._standing[rank].call.members for rank in circle}
            self._fail(self._different(circle), members.pop() if len(members) == 1 else None)

    def _different(self, ranks: Iterable[int]) -> str:
        waits = "; ".join(f"rank {rank} waits in {_named(self._standing[rank].call)}" for rank in sorted(ranks))
        return (
            f"ranks take part in different collectives: {waits}. "
            "Every rank must call the same collectives, of the same shapes, in the same order."
        )

    def _can_be_undone(self, ranks: Iterable[int]) -> bool:
        """Returns whether each rank waits in a single call of the same group, for which nothing has been sent yet."""
        calls = []
        for rank in ranks:
            standing = self._standing.get(rank)
            if standing is None or not standing.is_alone or standing.call.number is not None:
                return False
            agreement = self._agreements.get(_site(standing.call))
            if agreement is None or rank not in agreement.asked:  # the ranks have agreed since, and may be sending
                return False
            calls.append(standing.call)
        return not self._joined and len({call.members for call in calls}) == 1

    def _undo(self, ranks: Iterable[int]) -> None:
        """Makes the calls that all ranks of a group wait in fail without being counted, so that the ranks can go on."""
        why = self._different(ranks)
        for rank in ranks:
            agreement = self._agreements.pop(_site(self._standing.pop(rank).call), None)
            for member, request in agreement.asked.items() if agreement is not None else ():
                self._tell(member, Reply(request, error=why))

    def _circle(self, begin: int) -> list[int]:
        """Returns a circle of ranks that includes ``begin``, in which each rank waits for the next; empty for none."""
        paths = [[begin]] if begin in self._standing else []
        seen = set()
        while paths:
            path = paths.pop()
            for following in self._waits_for(path[-1]):
                if following == begin:
                    return path
                if following in self._standing and following not in seen:
                    seen.add(following)
                    paths.append([*path, following])
        return []

    def _waits_for(self, rank: int) -> Iterable[int]:
        call = self._standing[rank].call
        for other in self._ranks(call.members) - {rank} - set(self._joined):
            if call.number is None:
                agreement = self._agreements.get(_site(call))
                if agreement is not None and agreement.asked and other not in agreement.asked:
                    yield other
            elif other in self._standing:
                calls = self._standing[other].counts.get(call.number)  # None: it reported before it learned the number
                if calls is not None and calls <= call.call:
                    yield other

    # Ranks without more data.

    def _join(self, rank: int, counts: dict[int, int]) -> None:
        self._joined[rank] = counts
        if len(self._joined) == len(self._everyone):
            most: dict[int, int] = {}
            for counted in self._joined.values():
                most |= {number: max(count, most.get(number, 0)) for number, count in counted.items()}
            self._joined.clear()
            self._tell_all(AllJoined(rank, most))
            return
        self._tell_all(RankJoined(rank, counts))
        for agreement in self._agreements.values():
            self._settle(agreement)

    def _tell_all(self, message: RendezvousMessage) -> None:
        for rank in self._everyone:
            self._tell(rank, message)

    # Explaining a stall.

    def ask(self) -> None:
        """Asks every rank which collectives it has under way."""
        self._reports.clear()
        self._tell_all(StatusRequest())

    def all_have_answered(self) -> bool:
        """Returns whether every rank has answered."""
        return len(self._reports) == len(self._everyone)

    def concerned(self) -> frozenset[int]:
        """Returns the ranks of all groups that have a collective under way; all ranks if none is known."""
        calls = (call for report in self._reports.values() for call in report.under_way)
        return frozenset().union(*(self._ranks(call.members) for call in calls)) or self._everyone

    def explanation(self, seconds: float) -> StallReport:
        """Explains, from the ranks' answers, which ranks are missing from which collectives.

        Args:
            seconds: seconds that the rank which asked has waited.
        """
        lines = [f"a rank has waited for more than {seconds:g} s."]
        missing: dict[int, list[str]] = {}
        for rank in sorted(self._reports):
            for call in self._reports[rank].under_way:
                late = [
                    other
                    for other in sorted(self._ranks(call.members))
                    if other != rank and not self._takes_part(other, call)
                ]
                contents = f": {call.contents}" if call.contents else ""
                what = f"{_named(call)} (call {call.call + 1}{contents})"
                lines.append(f"rank {rank} has posted {what}; missing: {_listed(late) or 'none, it is under way'}.")
                for other in late:
                    missing.setdefault(other, []).append(_named(call))
        concerned = sorted(self.concerned())
        for rank in concerned:
            if rank not in self._reports:
                lines.append(f"{self._name(rank)} does not answer: it is stopped, or its link is cut.")
            elif rank in self._joined:
                lines.append(f"rank {rank} has called join().")
            elif rank in missing:
                keys = ", ".join(map(_named, self._reports[rank].under_way))
                state = f"has posted {keys}" if keys else "is in no collective"
                lines.append(
                    f"{self._name(rank)} {state}; it has not posted {', '.join(dict.fromkeys(missing[rank]))}."
                )
        late_ranks = {rank: self._name(rank) for rank in concerned if rank in missing or rank not in self._reports}
        return StallReport("\n  ".join(lines), late_ranks)

    def _takes_part(self, rank: int, call: CollectiveCall) -> bool:
        report = self._reports.get(rank)
        if report is None:
            return False
        if call.number is None:
            return any(_site(other) == _site(call) for other in report.under_way)
        return report.counts.get(call.number, 0) > call.call


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
