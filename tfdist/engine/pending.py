"""One call of a collective that has not completed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tfdist.cluster.messages import CollectiveCall
from tfdist.collectives.schedule import Schedule
from tfdist.comm.communicator import Request
from tfdist.engine.operations import Operation
from tfdist.errors import TfdistError

Site = tuple[tuple[int, ...] | None, str]
"""The members that use a key (None for all ranks), and the key; members agree on a number for each site."""


class Pending:
    """A posted collective.

    Attributes:
        key: the key of its call site.
        number: the number that the members have agreed on for the key; None before that.
        call: number of earlier calls with that key.
        members: ranks that take part; None for all.
        contents: description of the data, for messages; may be empty.
        operation: the collective, which starts once the number is known.
        ready: time at which the data was ready, on `time.monotonic`.
        patient: whether slow progress costs nothing while no thread waits.
        done: whether the collective is complete on this rank.
        result: result of the collective, once done.
        error: the error because of which this collective will not complete, although those of other groups go on.
    """

    def __init__(
        self,
        key: str,
        members: tuple[int, ...] | None = None,
        contents: str = "",
        ready: float | None = None,
        patient: bool = False,
    ) -> None:
        self.key = key
        self.members = members
        self.contents = contents
        self.ready = time.monotonic() if ready is None else ready
        self.patient = patient
        self.marks: list[float] = []
        self.number: int | None = None
        self.call = 0
        self.done = False
        self.result: Any = None
        self.error: TfdistError | None = None
        self.operation: Operation
        self.schedule: Schedule
        self.requests: Sequence[Request] = ()

    @property
    def name(self) -> str:
        """The key and the group, for messages."""
        return self.key if self.members is None else f"{self.key} in group {list(self.members)}"

    def describe(self) -> CollectiveCall:
        """Returns a description of the collective for other ranks."""
        return CollectiveCall(self.key, self.number, self.call, self.members, self.contents)
