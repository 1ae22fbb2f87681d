"""This process among those that meet in rounds: what it asks of the rendezvous server, and its links to the others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import msgspec
import numpy as np

from tfdist.cluster import quorum_messages as messages
from tfdist.cluster.channel import RefusedError, RequestTimeoutError
from tfdist.cluster.control import Control
from tfdist.cluster.message import Message
from tfdist.cluster.quorum_messages import Enlisted, Meeting, Outcome, Partner
from tfdist.cluster.settings import Timeouts
from tfdist.errors import MismatchError, RendezvousError, TfdistError
from tfdist.quorum.links import Links, Source
from tfdist.quorum.messages import State

log = logging.getLogger("tfdist")

_PROGRESS_SECONDS = 30.0
_FETCH_SECONDS = 30.0
"""For a state to come, beyond the time of grace."""

T = TypeVar("T")


class Members(Protocol):
    """The processes that meet.

    Attributes:
        task: this one's number.
        fit: how many calls of `fit` came before the one under way; None outside of `fit`.
        epoch: that this process is in.
        is_in_epoch: whether it has begun one in this `fit`.
        others: the last epoch of this `fit` that others are known to have come to.
        grace: seconds.
        patience: seconds in which something has to come that another process has.
    """

    task: int
    fit: int | None
    epoch: int
    is_in_epoch: bool
    others: int
    grace: float
    patience: float

    @property
    def links(self) -> Links:
        """To the others; a process alone has none, and sends nothing."""
        ...

    @property
    def failure(self) -> TfdistError | None:
        """Why this process cannot go on."""
        ...

    @property
    def is_behind(self) -> bool:
        """Whether others have come to a later epoch of this `fit`."""
        return self.others > self.epoch

    def offer(self, rounds: str, source: Source) -> None:
        """Gives others the state of rounds, from now on; see `tfdist.quorum.links.Links.offer`."""
        ...

    def fetch(self, address: str, rounds: str) -> tuple[State, list[np.ndarray]] | None:
        """Fetches the state of rounds; see `tfdist.quorum.links.Links.fetch`."""
        ...

    def enlist(self, rounds: str, round: int, settings: str, needs_quorum: bool) -> Enlisted:
        """Takes part from now on; see `tfdist.cluster.quorum_messages.Enlist`. Without a quorum, one is enough."""
        ...

    def ready(self, rounds: str, round: int, samples: int, ends: bool, checksum: int) -> Meeting:
        """Waits for a round to begin; see `tfdist.cluster.quorum_messages.Ready`."""
        ...

    def replace(self, rounds: str) -> int:
        """Makes this process's state that of all; see `tfdist.cluster.quorum_messages.Replace`."""
        ...

    def have(self, rounds: str, attempt: int) -> Outcome:
        """Waits for a meeting to end; see `tfdist.cluster.quorum_messages.Have`."""
        ...

    def lacks(self, rounds: str, attempt: int, tasks: list[int]) -> None:
        """Reports partners of which nothing comes; see `tfdist.cluster.quorum_messages.Lack`."""
        ...

    def is_aborted(self, rounds: str, attempt: int) -> bool:
        """Whether a meeting will not come about; raises what has ended the job."""
        ...

    def epoch_of(self, fit: int) -> int:
        """The epoch at which a call of `fit` begins; see `tfdist.cluster.quorum_messages.Where`."""
        ...

    def reach(self, fit: int, epoch: int) -> None:
        """Reports that this process has come to an epoch; see `tfdist.cluster.quorum_messages.Epoch`."""
        ...

    def linger(self, fit: int, rounds: tuple[str, ...]) -> None:
        """Stays until others have this process's state; see `tfdist.cluster.quorum_messages.Linger`."""
        ...


def end_together(members: Members, rounds: Sequence[str], refresh: Callable[[], bool]) -> None:
    """Ends a call of `fit` with the newest states of all who are in it, once they have them, too.

    Args:
        members: the processes.
        rounds: the names of those of the model.
        refresh: looks for newer states once, tells of which rounds this process's own are, and takes over what it
            finds; whether it has found some.
    """
    assert members.fit is not None
    is_newer = True  # there may be a last round that was made without this process
    while is_newer:
        while refresh():
            pass  # the next look tells that this process has that
        members.linger(members.fit, tuple(rounds))
        is_newer = refresh()


class Together(Members):
    """`Members` of a job.

    Args:
        control: of this task.
        links: to other tasks.
        quorum: how many a round needs.
        grace: seconds for which it waits for more.
        timeouts: how long to wait for a quorum.
    """

    def __init__(self, control: Control, links: Links, quorum: int, grace: float, timeouts: Timeouts) -> None:
        self.task = control.task
        self._links = links
        self.fit = None
        self.epoch = self.others = 0
        self.is_in_epoch = False
        self.grace, self.patience = grace, timeouts.start
        self._control, self._quorum, self._timeouts = control, quorum, timeouts
        self._aborted: dict[str, int] = {}
        self._error: TfdistError | None = None
        control.when_aborted(self._note)

    @property
    def links(self) -> Links:
        """See `Members`."""
        return self._links

    @property
    def failure(self) -> TfdistError | None:
        """See `Members`; also why this process did not get what it asked for last."""
        return self._control.failure or self._error

    def offer(self, rounds: str, source: Source) -> None:
        """See `Members`."""
        self.links.offer(rounds, source)

    def fetch(self, address: str, rounds: str) -> tuple[State, list[np.ndarray]] | None:
        """See `Members`."""
        return self.links.fetch(address, rounds, self.grace + _FETCH_SECONDS, lambda: self._control.failure)

    def _note(self, aborted: messages.Aborted) -> None:
        self._aborted[aborted.rounds] = aborted.attempt
        with self.links.arrived:
            self.links.arrived.notify_all()

    def enlist(self, rounds: str, round: int, settings: str, needs_quorum: bool) -> Enlisted:
        """See `Members`."""
        of = rounds, self.links.address, round, self._quorum if needs_quorum else 1, self.grace, settings
        what = f"a task that has a state of {rounds}"
        return self._ask(lambda request: messages.Enlist(request, *of), Enlisted, what)

    def ready(self, rounds: str, round: int, samples: int, ends: bool, checksum: int) -> Meeting:
        """See `Members`."""
        of = rounds, round, samples, ends, self.fit, checksum
        what = f"a quorum of {self._quorum} task(s) for round {round} of {rounds}"
        meeting = self._ask(lambda request: messages.Ready(request, *of), Meeting, what)
        self.others = meeting.epoch
        self.links.keep([partner.address for partner in meeting.partners])
        return meeting

    def replace(self, rounds: str) -> int:
        """See `Members`."""
        return int(self._control.request(lambda request: messages.Replace(request, rounds)))

    def have(self, rounds: str, attempt: int) -> Outcome:
        """See `Members`."""
        what = f"the other tasks to have all of {rounds}"
        return self._ask(lambda request: messages.Have(request, rounds, attempt), Outcome, what)

    def lacks(self, rounds: str, attempt: int, tasks: list[int]) -> None:
        """See `Members`."""
        log.warning("tfdist: nothing comes from task(s) %s in a round of %s; it is made without.", tasks, rounds)
        self._control.send(messages.Lack(rounds, attempt, tuple(tasks)))

    def is_aborted(self, rounds: str, attempt: int) -> bool:
        """See `Members`."""
        if self._control.failure is not None:
            raise self._control.failure
        return self._aborted.get(rounds, 0) >= attempt

    def epoch_of(self, fit: int) -> int:
        """See `Members`."""
        return int(self._control.request(lambda request: messages.Where(request, fit)))

    def reach(self, fit: int, epoch: int) -> None:
        """See `Members`."""
        self._control.send(messages.Epoch(fit, epoch))

    def linger(self, fit: int, rounds: tuple[str, ...]) -> None:
        """See `Members`."""
        with contextlib.suppress(RequestTimeoutError):  # a time of grace that is longer than all other waits
            self._control.request(lambda request: messages.Linger(request, fit, rounds))

    def _ask(self, make: Callable[[int], Message], kind: type[T], what: str) -> T:
        told = 0.0

        def late(seconds: float) -> None:
            nonlocal told
            if seconds - told > _PROGRESS_SECONDS:
                told = seconds
                log.warning("tfdist: task %d waits for %s.", self.task, what)

        self._error = None
        try:
            return msgspec.convert(self._control.request(make, late=late), kind)
        except RequestTimeoutError:
            self._error = RendezvousError(
                f"task {self.task} has waited for {what} for {self._timeouts.start:g} s. Start the tasks that are "
                "missing, make the strategy with a smaller quorum=, or raise TFDIST_START_TIMEOUT."
            )
        except RefusedError as error:
            self._error = MismatchError(str(error))
        assert self._error is not None
        raise self._error


class Alone(Members):
    """`Members` of a process alone."""

    task = 0
    fit = None
    epoch = others = 0
    is_in_epoch = False
    grace = patience = 0.0

    @property
    def links(self) -> Links:
        """See `Members`."""
        raise TfdistError("a process alone has no links to others")

    @property
    def failure(self) -> TfdistError | None:
        """See `Members`."""
        return None

    def offer(self, rounds: str, source: Source) -> None:
        """See `Members`; nobody asks."""

    def fetch(self, address: str, rounds: str) -> tuple[State, list[np.ndarray]] | None:
        """See `Members`; there are no others."""
        return None

    def enlist(self, rounds: str, round: int, settings: str, needs_quorum: bool) -> Enlisted:
        """See `Members`."""
        return Enlisted(max(round, 0), None, "")

    def ready(self, rounds: str, round: int, samples: int, ends: bool, checksum: int) -> Meeting:
        """See `Members`."""
        return Meeting(round, (Partner(0, samples, ""),))

    def replace(self, rounds: str) -> int:
        """See `Members`."""
        return 0

    def have(self, rounds: str, attempt: int) -> Outcome:
        """See `Members`."""
        return Outcome(True)

    def lacks(self, rounds: str, attempt: int, tasks: list[int]) -> None:
        """See `Members`; there are no others."""

    def is_aborted(self, rounds: str, attempt: int) -> bool:
        """See `Members`."""
        return False

    def epoch_of(self, fit: int) -> int:
        """See `Members`."""
        return 0

    def reach(self, fit: int, epoch: int) -> None:
        """See `Members`; nobody asks."""

    def linger(self, fit: int, rounds: tuple[str, ...]) -> None:
        """See `Members`; nobody comes."""
