"""Access of a process to those that meet in rounds: requests to the rendezvous server, and links to the others."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from tfdist.cluster import quorum_messages as messages
from tfdist.cluster.channel import RequestRefusedError, RequestTimeoutError, seldom
from tfdist.cluster.control import Control
from tfdist.cluster.message import RendezvousMessage
from tfdist.cluster.quorum_messages import Enlisted, Meeting, MeetingOutcome, Partner
from tfdist.cluster.settings import Timeouts
from tfdist.errors import MismatchError, RendezvousError, TfdistError
from tfdist.quorum.links import Links, StateSource
from tfdist.quorum.messages import FetchedState

log = logging.getLogger("tfdist")

_PROGRESS_SECONDS = 30.0
_FETCH_SECONDS = 30.0
"""Maximum time to wait for a state, in addition to the grace period."""

T = TypeVar("T")


class ClusterMembers:
    """Access to the processes of a job that meet.

    Args:
        control: connection of this task to the rendezvous server.
        links: links to other tasks.
        quorum: number of tasks that a round needs.
        grace: seconds for which a round waits for more tasks than the quorum.
        timeouts: timeouts of the job; ``start`` is how long to wait for a quorum.

    Attributes:
        task: number of this process.
        fit: number of calls of `fit` before the current one; None outside of `fit`.
        epoch: epoch of this process.
        is_in_epoch: whether this process has begun an epoch in this `fit`.
        others: latest epoch of this `fit` that other processes are known to have reached.
        grace: as given.
        patience: maximum time, in seconds, to wait for a state that another process has.
    """

    def __init__(self, control: Control, links: Links, quorum: int, grace: float, timeouts: Timeouts) -> None:
        self.task = control.task
        self._links = links
        self.fit: int | None = None
        self.epoch = self.others = 0
        self.is_in_epoch = False
        self.grace, self.patience = grace, timeouts.start
        self._control, self._quorum, self._timeouts = control, quorum, timeouts
        self._aborted: dict[str, int] = {}
        self._error: TfdistError | None = None
        control.when_aborted(self._note)

    @property
    def links(self) -> Links:
        """The links to the other tasks."""
        return self._links

    @property
    def failure(self) -> TfdistError | None:
        """The error that has ended the job, or that of this process's last request; None if there is none."""
        return self._control.failure or self._error

    @property
    def is_behind(self) -> bool:
        """Whether other processes have reached a later epoch of this `fit`."""
        return self.others > self.epoch

    def offer(self, rounds: str, source: StateSource) -> None:
        """Lets other processes fetch the state of rounds from now on; see `tfdist.quorum.links.Links.offer`."""
        self.links.offer(rounds, source)

    def fetch(self, source: int, address: str, rounds: str) -> tuple[FetchedState, list[np.ndarray]] | None:
        """Fetches the state of rounds from another process, as long as that is there; see `Links.fetch`."""

        def goes_on() -> bool:
            if self._control.failure is not None:
                raise self._control.failure
            return source in self._control.present

        try:
            return self.links.fetch(address, rounds, self.grace + _FETCH_SECONDS, goes_on)
        finally:
            self._control.send(messages.FetchEnded(rounds))

    def _note(self, aborted: messages.MeetingAborted) -> None:
        self._aborted[aborted.rounds] = aborted.attempt
        with self.links.arrived:
            self.links.arrived.notify_all()

    def enlist(self, rounds: str, round: int, settings: str, needs_quorum: bool) -> Enlisted:
        """Joins rounds; see `tfdist.cluster.quorum_messages.Enlist`. Without a quorum, one process is enough."""
        quorum = self._quorum if needs_quorum else 1
        what = f"a task that has a state of {rounds}"
        return self._ask(
            lambda request: messages.Enlist(request, rounds, self.links.address, round, quorum, self.grace, settings),
            Enlisted,
            what,
        )

    def ready(self, rounds: str, round: int, samples: int, ends: bool, checksum: int) -> Meeting:
        """Waits for a round to begin; see `tfdist.cluster.quorum_messages.ReadyForRound`."""
        what = f"a quorum of {self._quorum} task(s) for round {round} of {rounds}"
        meeting = self._ask(
            lambda request: messages.ReadyForRound(request, rounds, round, samples, ends, self.fit, checksum),
            Meeting,
            what,
        )
        self.others = meeting.epoch
        self.links.keep([partner.address for partner in meeting.partners])
        return meeting

    def replace(self, rounds: str) -> int:
        """Makes this process's state that of all processes; see `tfdist.cluster.quorum_messages.ReplaceState`."""
        return int(self._control.request(lambda request: messages.ReplaceState(request, rounds)))

    def have(self, rounds: str, attempt: int) -> MeetingOutcome:
        """Waits for a meeting to end; see `tfdist.cluster.quorum_messages.ContributionsReceived`."""
        what = f"the other tasks to receive all of {rounds}"
        return self._ask(lambda request: messages.ContributionsReceived(request, rounds, attempt), MeetingOutcome, what)

    def lacks(self, rounds: str, attempt: int, tasks: list[int]) -> None:
        """Reports partners that have sent nothing; see `tfdist.cluster.quorum_messages.ContributionsMissing`."""
        log.warning(
            "tfdist: nothing comes from task(s) %s in a round of %s; the round goes on without them.", tasks, rounds
        )
        self._control.send(messages.ContributionsMissing(rounds, attempt, tuple(tasks)))

    def is_aborted(self, rounds: str, attempt: int) -> bool:
        """Returns whether a meeting is aborted; raises the error that has ended the job."""
        if self._control.failure is not None:
            raise self._control.failure
        return self._aborted.get(rounds, 0) >= attempt

    def epoch_of(self, fit: int) -> int:
        """Returns the epoch at which a call of `fit` begins; see `tfdist.cluster.quorum_messages.AskFirstEpoch`."""
        return int(self._control.request(lambda request: messages.AskFirstEpoch(request, fit)))

    def reach(self, fit: int, epoch: int) -> None:
        """Reports that this process has reached an epoch; see `tfdist.cluster.quorum_messages.EpochReached`."""
        self._control.send(messages.EpochReached(fit, epoch))

    def linger(self, fit: int, rounds: tuple[str, ...]) -> None:
        """Waits until others have this process's state; see `tfdist.cluster.quorum_messages.FitEnded`."""
        with contextlib.suppress(RequestTimeoutError):  # if the grace period is longer than all other waits
            self._control.request(lambda request: messages.FitEnded(request, fit, rounds))

    def _ask(self, make: Callable[[int], RendezvousMessage], kind: type[T], what: str) -> T:
        late = seldom(_PROGRESS_SECONDS, lambda: log.warning("tfdist: task %d waits for %s.", self.task, what))
        self._error = None
        try:
            return msgspec.convert(self._control.request(make, late=late), kind)
        except RequestTimeoutError:
            self._error = RendezvousError(
                f"task {self.task} has waited for {what} for {self._timeouts.start:g} s. Start the tasks that are "
                "missing, make the strategy with a smaller quorum=, or raise TFDIST_START_TIMEOUT."
            )
        except RequestRefusedError as error:
            self._error = MismatchError(str(error))
        assert self._error is not None
        raise self._error


class SingleProcessMembers:
    """The same for a process that trains alone."""

    task = 0
    fit: int | None = None
    epoch = others = 0
    is_in_epoch = is_behind = False
    grace = patience = 0.0

    @property
    def links(self) -> Links:
        """Raises an error, because there are no links."""
        raise TfdistError("a process alone has no links to others")

    @property
    def failure(self) -> TfdistError | None:
        """None, because nothing can fail."""
        return None

    def offer(self, rounds: str, source: StateSource) -> None:
        """Does nothing, because no other process asks."""

    def fetch(self, source: int, address: str, rounds: str) -> tuple[FetchedState, list[np.ndarray]] | None:
        """Returns None, because there are no other processes."""
        return None

    def enlist(self, rounds: str, round: int, settings: str, needs_quorum: bool) -> Enlisted:
        """Returns that this process has the newest state."""
        return Enlisted(max(round, 0), None, "")

    def ready(self, rounds: str, round: int, samples: int, ends: bool, checksum: int) -> Meeting:
        """Returns a meeting of this process alone."""
        return Meeting(round, (Partner(0, samples, ""),))

    def replace(self, rounds: str) -> int:
        """Returns round 0, because no other process has a state."""
        return 0

    def have(self, rounds: str, attempt: int) -> MeetingOutcome:
        """Returns that the meeting counts."""
        return MeetingOutcome(True)

    def lacks(self, rounds: str, attempt: int, tasks: list[int]) -> None:
        """Does nothing, because there are no partners."""

    def is_aborted(self, rounds: str, attempt: int) -> bool:
        """Returns False, because no partner can be lost."""
        return False

    def epoch_of(self, fit: int) -> int:
        """Returns 0, because no other process is ahead."""
        return 0

    def reach(self, fit: int, epoch: int) -> None:
        """Does nothing, because no other process asks."""

    def linger(self, fit: int, rounds: tuple[str, ...]) -> None:
        """Does nothing, because no other process needs the state."""


Members = ClusterMembers | SingleProcessMembers
"""Access of a process to those that meet: of a task of a job, or of a process alone."""


def end_together(members: Members, rounds: Sequence[str], refresh: Callable[[], bool]) -> None:
    """Ends a call of `fit` once all processes that are in it have the newest states.

    Args:
        members: access to the processes that meet.
        rounds: names of the model's rounds.
        refresh: looks once for newer states, reports the rounds of this process's own, takes over what it finds, and
            returns whether it has found any.
    """
    assert members.fit is not None
    is_newer = True  # there may be a last round that was made without this process
    while is_newer:
        while refresh():
            pass  # the next look reports that this process has that state
        members.linger(members.fit, tuple(rounds))
        is_newer = refresh()
