"""One call of one collective, under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tfdist.collectives.schedule import Plan, Schedule
from tfdist.comm.communicator import Request


class Pending:
    """A collective under way.

    Attributes:
        key: of its call site.
        number: that the members know the key by; None while they are agreeing on it.
        call: how many calls of that key came before it.
        members: the ranks that take part; None if all do.
        contents: what it carries, in words, for messages; may be empty.
        plan: what to do, once that number is known.
        stand_in: what a rank without data needs to take part, for `tfdist.engine.joining`; None if it cannot.
        ready: when there was something to do, on `time.monotonic`.
        done: whether it is complete, on this rank.
        result: what it gave, once done.
    """

    def __init__(
        self,
        key: str,
        members: tuple[int, ...] | None = None,
        contents: str = "",
        stand_in: dict[str, Any] | None = None,
        ready: float | None = None,
    ) -> None:
        self.key = key
        self.members = members
        self.contents = contents
        self.stand_in = stand_in
        self.ready = time.monotonic() if ready is None else ready
        self.marks: list[float] = []
        self.number: int | None = None
        self.call = 0
        self.done = False
        self.result: Any = None
        self.plan: Plan
        self.schedule: Schedule
        self.requests: Sequence[Request] = ()

    @property
    def name(self) -> str:
        """The key, and whose it is, for messages."""
        return self.key if self.members is None else f"{self.key} in group {list(self.members)}"

    def describe(self) -> dict[str, Any]:
        """What other ranks are told of it."""
        return {
            "key": self.key,
            "number": self.number,
            "call": self.call,
            "members": self.members,
            "contents": self.contents,
        }
