"""One rank's wait for one collective as it grows long: what it tells the server, and when it ends in an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfdist.cluster.control import Control
from tfdist.cluster.settings import Timeouts
from tfdist.engine.pending import Pending
from tfdist.errors import CollectiveTimeoutError, PeerLostError, TfdistError

STANDING_SECONDS = 1.0
"""After so long, a rank that does nothing else than wait says so: ranks that wait for each other are told at once."""


class Patience:
    """How long to wait, and for whom.

    Args:
        rank: this process's.
        control: the connection to the server.
        timeouts: after which to explain, and to give up.
        pending: what is waited for.
        blocking: whether this rank does nothing else meanwhile.
        counts: how many calls of each collective this rank has begun.
    """

    def __init__(
        self,
        rank: int,
        control: Control,
        timeouts: Timeouts,
        pending: Pending,
        blocking: bool,
        counts: Callable[[], dict[str, int]],
    ) -> None:
        self._rank = rank
        self._control = control
        self._timeouts = timeouts
        self._pending = pending
        self._blocking = blocking
        self._counts = counts
        self._standing = False
        self._stalls = 0

    def check(self, seconds: float) -> None:
        """Called now and then while the wait lasts, with its length so far.

        Raises:
            TfdistError: it is of no use any more, or has lasted too long.
        """
        if self._control.failure:
            raise self._control.failure
        for rank, counts in list(self._control.departed.items()):
            if self._is_missing(rank, counts):
                raise PeerLostError(
                    f"rank {self._rank} waits in {self._pending.name} (call {self._pending.call + 1}), but "
                    f"{self._control.names[rank]} has ended its script without it. Every rank must take the same steps."
                )
        if self._pending.stand_in is None and self._pending.number is not None:
            for rank, counts in list(self._control.joined.items()):
                if self._is_missing(rank, counts):
                    raise PeerLostError(
                        f"rank {self._rank} waits in {self._pending.name}, but rank {rank} has joined. Sums, gathers "
                        "and barriers go on without a rank that has joined; this does not."
                    )
        self.tell(seconds)
        if seconds > self._timeouts.collective:
            raise self.too_late()

    def tell(self, seconds: float) -> None:
        """Tells the server what it should know by now."""
        if self._blocking and not self._standing and seconds > STANDING_SECONDS:
            self._standing = True
            message: dict[str, Any] = {"type": "standing", "counts": self._counts(), **self._pending.describe()}
            self._control.send(message)
        if seconds > (self._stalls + 1) * self._timeouts.stall:
            self._stalls += 1
            self._control.send({"type": "stalled", "seconds": self._stalls * self._timeouts.stall})

    def over(self) -> None:
        """The wait has ended."""
        if self._standing:
            self._control.send({"type": "moving"})

    def too_late(self) -> TfdistError:
        """What to say at the deadline."""
        return CollectiveTimeoutError(
            f"rank {self._rank} waited {self._timeouts.collective:g} s in {self._pending.name} (call "
            f"{self._pending.call + 1}) for ranks that are alive but did not take part. Look at what they do; if they "
            "may take that long, raise TFDIST_COLLECTIVE_TIMEOUT."
        )

    def _is_missing(self, rank: int, counts: dict[str, int]) -> bool:
        """Whether a rank, which has made so many calls and makes no more, belongs here."""
        pending = self._pending
        takes_part = pending.members is None or rank in pending.members
        agreeing = pending.number is None  # on what the key's number is: it did not stay for the answer
        return takes_part and (agreeing or counts.get(str(pending.number), 0) <= pending.call)
