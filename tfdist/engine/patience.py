"""A rank's long wait for a collective: reports to the rendezvous server, and errors."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tfdist.cluster import messages
from tfdist.cluster.control import Control
from tfdist.cluster.settings import Timeouts
from tfdist.engine.pending import Pending
from tfdist.errors import CollectiveTimeoutError, PeerLostError, TfdistError

STANDING_SECONDS = 1.0
"""Seconds after which a rank that only waits reports it to the server, which detects ranks waiting for each other; and
after which it looks whether the report is still true."""

RUN_WITHOUT_A_RANK = (
    "Only gathers, barriers, and sums that are not made in shared memory can run without a rank that has joined: call "
    "others before any rank joins, or afterwards; TFDIST_MACHINE_CODE=0 sums a strategy's gradients without it."
)
"""The advice where another collective was called."""

_ANSWER_SECONDS = 5.0
"""Seconds after the deadline in which the server may still explain which ranks are late."""


class WaitMonitor:
    """Decides how long to wait for a collective, and for which ranks.

    Args:
        rank: this process's rank.
        control: the connection to the rendezvous server.
        timeouts: deadlines for the report of a stall and for the end of the wait.
        pending: the collective.
        members: ranks that take part in it.
        standing: function that returns the message that reports that this rank stands still, or None if it does not.
    """

    def __init__(
        self,
        rank: int,
        control: Control,
        timeouts: Timeouts,
        pending: Pending,
        members: Collection[int],
        standing: Callable[[], messages.WaitingForCall | None],
    ) -> None:
        self._rank = rank
        self._control = control
        self._timeouts = timeouts
        self._pending = pending
        self._members = members
        self._standing = standing
        self._reported: messages.WaitingForCall | None = None
        self._looks = 0
        self._stalls = 0
        self._asked: float | None = None
        self._known: messages.StallReport | None = None

    def check(self, seconds: float) -> None:
        """Reports or ends the wait. Called regularly, with the seconds waited so far.

        Raises:
            TfdistError: the collective cannot complete any more, or the wait has lasted too long.
        """
        if self._control.failure:
            raise self._control.failure
        for rank, counts in list(self._control.departed.items()):
            if self._is_missing(rank, counts):
                raise PeerLostError(
                    f"rank {self._rank} waits in {self._pending.name} (call {self._pending.call + 1}), but "
                    f"{self._control.names[rank]} has ended its script without it. Every rank must call the same "
                    "collectives."
                )
        if self._pending.operation.stand_in is None and self._pending.number is not None:
            for rank, counts in list(self._control.joined.items()):
                if self._is_missing(rank, counts):
                    raise PeerLostError(
                        f"rank {self._rank} waits in {self._pending.name}, but rank {rank} has called join(). "
                        f"{RUN_WITHOUT_A_RANK}"
                    )
        self.tell(seconds)
        if seconds > self._timeouts.collective and self._is_explained(seconds):
            raise self._too_late()

    def tell(self, seconds: float) -> None:
        """Reports the wait to the server when a report is due."""
        if seconds > (self._looks + 1) * STANDING_SECONDS:
            self._looks = int(seconds / STANDING_SECONDS)
            self._says(self._standing())
        if seconds > (self._stalls + 1) * self._timeouts.stall:
            self._stalls += 1
            self._control.send(messages.Stalled(self._stalls * self._timeouts.stall))

    def over(self) -> None:
        """Ends the wait."""
        self._says(None)

    def _says(self, report: messages.WaitingForCall | None) -> None:
        if report != self._reported:
            self._control.send(report or messages.Resumed())
            self._reported = report

    def _is_explained(self, seconds: float) -> bool:
        """Asks the server who is late once the deadline is over; returns whether it has answered, or is late itself."""
        if self._asked is None:
            self._asked, self._known = seconds, self._control.stall
            self._control.send(messages.Stalled(self._timeouts.collective))
        return self._control.stall is not self._known or seconds > self._asked + _ANSWER_SECONDS

    def _too_late(self) -> TfdistError:
        """Returns the error for a wait that exceeds the deadline."""
        stall, members = self._control.stall, self._pending.members
        late = [
            name
            for rank, name in (stall.late.items() if stall is not None and stall is not self._known else ())
            if rank != self._rank and (members is None or rank in members)
        ]
        return CollectiveTimeoutError(
            f"rank {self._rank} waited {self._timeouts.collective:g} s in {self._pending.name} (call "
            f"{self._pending.call + 1}), in which {' and '.join(late) or 'other ranks'} did not take part. Check what "
            "they are doing; if they may take that long, raise TFDIST_COLLECTIVE_TIMEOUT."
        )

    def _is_missing(self, rank: int, counts: dict[int, int]) -> bool:
        """Returns whether the collective needs a rank that posts no more calls than those in ``counts``."""
        pending = self._pending
        takes_part = rank in self._members  # evaluators and parameter servers leave, too
        if pending.number is None:  # the members have not agreed on the number yet, which needs every one of them
            return takes_part
        return takes_part and counts.get(pending.number, 0) <= pending.call
