"""What the rendezvous server knows of the ranks' collectives: their numbers, who stands still, and who has joined.

Only what is rare comes here: the first use of a key, a wait that has become long, a rank without more data. A
collective that goes as it should is between the ranks alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


@dataclass
class Agreement:
    """A collective's name, on its way to a number that its ranks know it by."""

    number: int
    members: frozenset[int]
    signatures: dict[int, str] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)


@dataclass
class Standstill:
    """A rank that does nothing else until others take part in a collective.

    Attributes:
        site: of the collective.
        number: that it is known by; None while the ranks are agreeing on it.
        call: how many calls of it came before.
        members: who takes part in it.
        counts: how many calls the rank has begun, by number.
    """

    site: Site
    number: int | None
    call: int
    members: frozenset[int]
    counts: dict[str, int]


Site = tuple[tuple[int, ...] | None, str]
"""A key, and the members of the group that it is of; None for all."""


def _site(message: Message) -> Site:
    members = message.get("members")
    return None if members is None else tuple(members), message["key"]


def _named(site: Site) -> str:
    members, key = site
    return key if members is None else f"{key} in group {list(members)}"


class Coordination:
    """The bookkeeping, without a connection of its own.

    Args:
        size: number of ranks.
        name: what a rank is called in messages.
        tell: sends a message to a rank.
        fail: ends the job: ranks do different things, as the given text says.
    """

    def __init__(
        self, size: int, name: Callable[[int], str], tell: Callable[[int, Message], None], fail: Callable[[str], None]
    ) -> None:
        self._everyone = frozenset(range(size))
        self._name = name
        self._tell = tell
        self._fail = fail
        self._agreements: dict[Site, Agreement] = {}
        self._standing: dict[int, Standstill] = {}
        self._joined: dict[int, dict[str, int]] = {}
        self._reports: dict[int, Message] = {}

    def heard(self, rank: int, message: Message) -> bool:
        """Takes in what a rank says; whether it was about collectives."""
        kind = message.get("type")
        if kind == "agree":
            self._agree(rank, message)
        elif kind == "standing":
            self._stands(rank, message)
        elif kind == "moving":
            self._standing.pop(rank, None)
        elif kind == "join":
            self._join(rank, message)
        elif kind == "invite":
            for target in message["to"]:
                self._tell(target, {**message, "type": "invited"})
        elif kind == "state":
            self._reports[rank] = message
        else:
            return False
        return True

    # The numbers of collectives.

    def _members(self, message: Message) -> frozenset[int]:
        members = message.get("members")
        return self._everyone if members is None else frozenset(members)

    def _agree(self, rank: int, message: Message) -> None:
        signature = message["signature"]
        site = _site(message)
        agreement = self._agreements.get(site)
        if agreement is None:
            agreement = self._agreements[site] = Agreement(len(self._agreements), self._members(message))
        for other, theirs in agreement.signatures.items():
            if theirs != signature:
                self._fail(
                    f"ranks differ in {_named(site)}: rank {other} has {theirs}, rank {rank} has {signature}. "
                    "Every rank must build the same model and take the same steps."
                )
                return
        agreement.signatures[rank] = signature
        agreement.asked[rank] = message["id"]
        self._settle(agreement)

    def _settle(self, agreement: Agreement) -> None:
        """Tells a number to those who asked, when nobody is missing any more."""
        if not agreement.asked or agreement.members - set(agreement.asked) - set(self._joined):
            return
        for rank, request in agreement.asked.items():
            self._tell(rank, {"re": request, "number": agreement.number})
        agreement.asked.clear()
        agreement.signatures.clear()

    # Ranks that wait for each other.

    def _stands(self, rank: int, message: Message) -> None:
        self._standing[rank] = Standstill(
            _site(message), message["number"], message["call"], self._members(message), message["counts"]
        )
        if circle := self._circle(rank):
            different = "; ".join(f"rank {one} waits in {_named(self._standing[one].site)}" for one in sorted(circle))
            self._fail(
                f"ranks take part in different collectives: {different}. "
                "Every rank must call the same collectives in the same order."
            )

    def _circle(self, begin: int) -> list[int]:
        """Ranks, this one among them, of which each stands still until the next one moves; empty if there are none."""
        paths = [[begin]]
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
        still = self._standing[rank]
        for other in still.members - {rank} - set(self._joined):
            if still.number is None:
                agreement = self._agreements.get(still.site)
                if agreement is not None and agreement.asked and other not in agreement.asked:
                    yield other
            elif other in self._standing and self._standing[other].counts.get(str(still.number), 0) <= still.call:
                yield other

    # Ranks without more data.

    def _join(self, rank: int, message: Message) -> None:
        self._joined[rank] = message["counts"]
        if len(self._joined) == len(self._everyone):
            self._joined.clear()
            self._tell_all({"type": "all joined", "last": rank})
            return
        self._tell_all({"type": "joined", "rank": rank, "counts": message["counts"]})
        for agreement in self._agreements.values():
            self._settle(agreement)

    def _tell_all(self, message: Message) -> None:
        for rank in self._everyone:
            self._tell(rank, message)

    # Explaining a stall.

    def ask(self) -> None:
        """Asks every rank what it has under way."""
        self._reports.clear()
        self._tell_all({"type": "report"})

    def all_have_answered(self) -> bool:
        """Whether every rank has said what it has under way."""
        return len(self._reports) == len(self._everyone)

    def explanation(self, seconds: float) -> str:
        """Who is missing from what, by what the ranks have answered.

        Args:
            seconds: how long the wait has been.
        """
        lines = [f"a rank has waited for more than {seconds:g} s."]
        missing: dict[int, list[str]] = {}
        for rank in sorted(self._reports):
            for one in self._reports[rank]["under_way"]:
                late = [
                    other
                    for other in (self._everyone if one["members"] is None else one["members"])
                    if other != rank and not self._takes_part(other, one)
                ]
                what = f"{_named(_site(one))} (call {one['call'] + 1}{_of(one['contents'])})"
                lines.append(f"rank {rank} has posted {what}; missing: {_ranks(late) or 'nobody, it is under way'}.")
                for other in late:
                    missing.setdefault(other, []).append(_named(_site(one)))
        for rank in sorted(self._everyone):
            if rank not in self._reports:
                lines.append(f"{self._name(rank)} does not answer: it is stopped, or its link is cut.")
            elif rank in self._joined:
                lines.append(f"rank {rank} has joined.")
            elif rank in missing:
                report = self._reports[rank]
                keys = ", ".join(_named(_site(one)) for one in report["under_way"])
                state = f"has posted {keys}" if keys else "is in no collective"
                lines.append(
                    f"{self._name(rank)} {state}; it has not posted {', '.join(dict.fromkeys(missing[rank]))}."
                )
        return "\n  ".join(lines)

    def _takes_part(self, rank: int, one: Message) -> bool:
        report = self._reports.get(rank)
        if report is None:
            return False
        if one["number"] is None:
            return any(_site(other) == _site(one) for other in report["under_way"])
        return report["counts"].get(str(one["number"]), 0) > one["call"]


def _of(contents: str) -> str:
    return f": {contents}" if contents else ""


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)
