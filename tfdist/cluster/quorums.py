"""The rendezvous server's part in rounds that need only a quorum of the training tasks.

A round *begins* when all awaited tasks are ready for it, or, when only a quorum is ready, after a time of grace. The
tasks that are ready then *meet*: they exchange their contributions, and each task reports when it has received all of
them. The meeting counts when all its tasks have reported this. If one of them is lost before, the meeting counts for
none of them, and the others meet again without that task. Because only this server decides, no two parts of the job can
go on with different states.

A partner that sends nothing, or that does not report in time, is left out after the time of grace. The others make the
round without it, and it is in no other meeting for that round, unless the quorum needs it.

All tasks that meet have the same state, which checksums verify. A task whose program has changed its variables has a
different state of the same round: it takes the state of the task that has been there longest. A task may also give its
own state to all. That state counts as a round of its own.

If a round is made without a task, later rounds do not wait for that task until it is ready again. It takes the newest
state from a task that has it, and so does a new task. If no task has a state, the chief begins with its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tfdist.cluster.message import RendezvousMessage
from tfdist.cluster.messages import Reply
from tfdist.cluster.quorum_messages import (
    AskFirstEpoch,
    ContributionsMissing,
    ContributionsReceived,
    Enlist,
    Enlisted,
    EpochReached,
    FetchEnded,
    FitEnded,
    Meeting,
    MeetingAborted,
    MeetingOutcome,
    Partner,
    ReadyForRound,
    ReplaceState,
    RoundsMessage,
)

_CHIEF = 0
_LINGER_SECONDS = 10.0
"""Seconds for which a task that has ended `fit` stays for others at most, unless one of them fetches a state, or a time
of grace is longer."""


@dataclass
class _Meeting:
    """A meeting under way.

    Attributes:
        attempt: number of the meeting.
        ready: messages with which the partners reported that they are ready, by task.
        have: ids of the requests of the partners that have received everything, by task.
    """

    attempt: int
    ready: dict[int, ReadyForRound]
    have: dict[int, int] = field(default_factory=dict)


@dataclass
class _Rounds:
    """The rounds of one name.

    Attributes:
        first: message with which the first task has enlisted.
        has: number of the round of each task's state, by task.
        addresses: ``host:port`` of the tasks, by task, in the order in which they enlisted.
        awaited: tasks that the next round waits for.
        waiting: ids of the requests of tasks that wait until there is any state, by task.
        ready: messages of the tasks that are ready for the next round, by task.
        left_out: tasks that the next round is made without.
        late: messages of the left-out tasks that are ready after all, by task.
        meeting: the meeting that is under way.
        attempts: number of meetings so far.
        patience: number of times of grace so far; only the last one is still valid.
        is_patient: whether a time of grace is running.
        made: number of the newest state that there was.
        fetching: tasks that fetch a newer state.
    """

    first: Enlist
    has: dict[int, int] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)
    ready: dict[int, ReadyForRound] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    late: dict[int, ReadyForRound] = field(default_factory=dict)
    meeting: _Meeting | None = None
    attempts: int = 0
    patience: int = 0
    is_patient: bool = False
    made: int = -1
    fetching: set[int] = field(default_factory=set)

    @property
    def newest(self) -> int:
        """Number of the round of the newest state; -1 if no task has a state."""
        return max(self.has.values(), default=-1)


_NONE = _Rounds(Enlist(0, "", "", -1, 1, 0.0, ""))
"""Rounds that no task takes part in; they stand for a name that no task has enlisted for."""


class QuorumCoordinator:
    """The server's bookkeeping of rounds; it has no connection of its own.

    Args:
        tell: function that sends a message to a task.
        later: function that calls back after some seconds.
        start_timeout: seconds in which the chief, if it is there, has to begin with its state.
    """

    def __init__(
        self,
        tell: Callable[[int, RendezvousMessage], None],
        later: Callable[[float, Callable[[], None]], Any],
        start_timeout: float,
    ) -> None:
        self._tell = tell
        self._later = later
        self._start_timeout = start_timeout
        self._rounds: dict[str, _Rounds] = {}
        self._furthest = (0, 0)
        self._at: dict[int, tuple[int, int]] = {}  # each task's call of `fit` and epoch
        self._lingering: dict[int, FitEnded] = {}
        self._ending: set[int] = set()  # tasks that have ended `fit`, and fetch the newest states before they go on
        self._chief_is_there = False

    def heard(self, task: int, message: RoundsMessage) -> None:
        """Handles a task's message."""
        match message:
            case Enlist():
                self._enlist(task, message)
            case AskFirstEpoch(request, fit):
                self._answer(task, request, self._epoch_of(fit))
            case EpochReached(fit, epoch):
                self._ending.discard(task)
                self._reach(task, (fit, epoch))
            case FitEnded():
                self._ending.add(task)
                self._reach(task, (message.fit + 1, 0))
                self._linger(task, message)
            case ReadyForRound() | ContributionsReceived() | ContributionsMissing() | ReplaceState() | FetchEnded():
                if task in self._of(message.rounds).addresses:
                    self._of_a_round(task, self._rounds[message.rounds], message)
        self._release()

    def _of(self, rounds: str) -> _Rounds:
        return self._rounds.get(rounds, _NONE)

    def _of_a_round(
        self,
        task: int,
        rounds: _Rounds,
        message: ReadyForRound | ContributionsReceived | ContributionsMissing | ReplaceState | FetchEnded,
    ) -> None:
        match message:
            case ReadyForRound():
                self._is_ready(task, rounds, message)
            case ContributionsReceived():
                self._has(task, rounds, message)
            case ContributionsMissing():
                self._lacks(rounds, message)
            case ReplaceState():
                self._replace(task, rounds, message)
            case FetchEnded():
                rounds.fetching.discard(task)

    def came(self, task: int) -> None:
        """Notes that a task is there, perhaps again."""
        self._chief_is_there |= task == _CHIEF

    def gone(self, task: int, lost: bool) -> None:
        """Forgets a task that is not there any more.

        Args:
            task: number of the task.
            lost: whether the task may come again, because its script has not ended.
        """
        self._chief_is_there &= task != _CHIEF
        self._at.pop(task, None)
        self._lingering.pop(task, None)
        self._ending.discard(task)
        for rounds in self._rounds.values():
            for kept in (rounds.has, rounds.addresses, rounds.waiting, rounds.ready, rounds.late):
                kept.pop(task, None)
            for tasks in (rounds.awaited, rounds.left_out, rounds.fetching):
                tasks.discard(task)
            self._leave_meeting(task, rounds)
            self._look(rounds)
            if not rounds.has:
                self._begin_without_the_chief(rounds)
        if lost and not any(rounds.has for rounds in self._rounds.values()):
            self._furthest = (0, 0)  # no state is left, so that the next tasks begin anew
        self._release()

    def _leave_meeting(self, task: int, rounds: _Rounds) -> None:
        """Aborts a meeting under way that needs a task; one that has everything already is only forgotten."""
        meeting = rounds.meeting
        if meeting is None or task not in meeting.ready:
            return
        if task not in meeting.have:
            self._abort(rounds)
        else:
            del meeting.ready[task], meeting.have[task]

    # States.

    def _enlist(self, task: int, message: Enlist) -> None:
        rounds = self._rounds.setdefault(message.rounds, _Rounds(message))
        sent, first = ((request.quorum, request.grace, request.settings) for request in (message, rounds.first))
        if sent != first:
            error = (
                f"task {task} has quorum={sent[0]}, grace={sent[1]:g}, {sent[2]}; the others have quorum={first[0]}, "
                f"grace={first[1]:g}, {first[2]}. Give every task the same arguments and the same model."
            )
            self._tell(task, Reply(message.id, error=error))
            return
        rounds.addresses[task] = message.address
        rounds.fetching.discard(task)
        rounds.has.pop(task, None)
        if message.round >= 0:
            rounds.has[task] = message.round
        if rounds.newest < 1 or message.round == rounds.newest:
            rounds.awaited.add(task)  # even before it is ready, as tasks may need long for their first step
        if rounds.has:
            self._point(task, message.id, rounds)
        else:
            rounds.waiting[task] = message.id
            if task == _CHIEF:
                self._begin_with(task, rounds)
            elif len(rounds.waiting) == 1:
                self._begin_without_the_chief(rounds)

    def _point(self, task: int, request: int, rounds: _Rounds) -> None:
        """Tells a task where the newest state is."""
        newest = rounds.newest
        sources = [holder for holder, has in rounds.has.items() if has == newest]
        lost, rounds.made = max(0, rounds.made - newest), newest
        if task in sources:
            self._answer(task, request, Enlisted(newest, None, "", lost))
        else:
            rounds.fetching.add(task)
            self._answer(task, request, Enlisted(newest, sources[0], rounds.addresses[sources[0]], lost))

    def _replace(self, task: int, rounds: _Rounds, message: ReplaceState) -> None:
        """Makes a task's own state the newest one."""
        rounds.has[task] = rounds.made = rounds.newest + 1
        self._answer(task, message.id, rounds.has[task])
        self._begin_again(rounds)
        if rounds.meeting is not None:
            self._abort(rounds)

    def _begin_with(self, task: int, rounds: _Rounds) -> None:
        """Makes a task's own state the initial state of all tasks."""
        rounds.has[task] = 0
        while rounds.waiting:
            self._point(*rounds.waiting.popitem(), rounds)

    def _begin_without_the_chief(self, rounds: _Rounds) -> None:
        """Lets another task begin with its state if the chief, which may have a backup to restore, does not come."""

        def begin() -> None:
            if rounds.waiting and not rounds.has:
                self._begin_with(min(rounds.waiting), rounds)

        if rounds.waiting:
            self._later(self._start_timeout if self._chief_is_there else rounds.first.grace, begin)

    # Rounds.

    def _is_ready(self, task: int, rounds: _Rounds, message: ReadyForRound) -> None:
        if message.fit is not None and message.fit < self._furthest[0]:
            self._answer(task, message.id, Meeting(over=True))
            return
        if message.round <= rounds.newest:
            rounds.awaited.add(task)
            self._answer(task, message.id, Meeting(epoch=self._epoch_of(message.fit)))
            return
        rounds.has[task] = message.round - 1
        if task in rounds.left_out:
            rounds.late[task] = message
        else:
            rounds.awaited.add(task)
            rounds.ready[task] = message
        self._look(rounds)

    def _look(self, rounds: _Rounds) -> None:
        """Begins the next round if it is time."""
        if rounds.meeting is not None:
            return
        if rounds.late and len(rounds.ready) < rounds.first.quorum and not rounds.awaited - rounds.ready.keys():
            rounds.ready.update(rounds.late)  # without the late tasks there is no quorum
            rounds.awaited |= rounds.late.keys()
            rounds.late, rounds.left_out = {}, set()
        if len(rounds.ready) < rounds.first.quorum:
            return
        if rounds.awaited <= rounds.ready.keys():
            self._meet(rounds)
        elif not rounds.is_patient:
            rounds.is_patient = True
            rounds.patience += 1
            number = rounds.patience

            def end() -> None:
                if rounds.is_patient and rounds.patience == number:
                    rounds.is_patient = False
                    if rounds.meeting is None and len(rounds.ready) >= rounds.first.quorum:
                        self._meet(rounds)

            self._later(rounds.first.grace, end)

    def _send_back(self, rounds: _Rounds) -> bool:
        """Has tasks whose state differs take the state of the others. Returns whether there are such tasks."""
        oldest = next(task for task in rounds.addresses if task in rounds.ready)  # addresses are in order of arrival
        agreed = rounds.ready[oldest].checksum
        astray = {task: ready for task, ready in rounds.ready.items() if ready.checksum != agreed}
        for task, ready in astray.items():
            del rounds.ready[task]
            rounds.has.pop(task, None)
            self._answer(task, ready.id, Meeting(astray=True, epoch=self._epoch_of(ready.fit)))
        return bool(astray)

    def _meet(self, rounds: _Rounds) -> None:
        rounds.is_patient = False
        if self._send_back(rounds):
            self._look(rounds)
            return
        rounds.attempts += 1
        rounds.awaited &= rounds.ready.keys()
        meeting = rounds.meeting = _Meeting(rounds.attempts, rounds.ready)
        rounds.ready = {}
        partners = tuple(
            Partner(task, ready.samples, rounds.addresses[task]) for task, ready in sorted(meeting.ready.items())
        )
        for task, ready in meeting.ready.items():
            self._answer(task, ready.id, Meeting(meeting.attempt, partners, epoch=self._epoch_of(ready.fit)))

    def _has(self, task: int, rounds: _Rounds, message: ContributionsReceived) -> None:
        meeting = rounds.meeting
        if meeting is None or meeting.attempt != message.attempt or task not in meeting.ready:
            self._answer(task, message.id, MeetingOutcome(False))
            return
        meeting.have[task] = message.id
        if len(meeting.have) == 1:
            self._later(
                rounds.first.grace, lambda: self._leave_out(rounds, meeting, meeting.ready.keys() - meeting.have)
            )
        if meeting.have.keys() == meeting.ready.keys():
            rounds.meeting = None
            ended = [self._at.get(member, (0, 0)) for member, ready in meeting.ready.items() if ready.ends]
            for member, request in meeting.have.items():
                rounds.has[member] = rounds.made = meeting.ready[member].round
                ends = any(epoch >= self._at.get(member, (0, 0)) for epoch in ended)  # not an epoch begun since
                self._answer(member, request, MeetingOutcome(True, ends))
            self._begin_again(rounds)

    def _begin_again(self, rounds: _Rounds) -> None:
        """Checks again which tasks are ready, because a round may have been made without them."""
        waiting = rounds.ready | rounds.late
        rounds.ready, rounds.late, rounds.left_out = {}, {}, set()
        for task, ready in waiting.items():
            self._is_ready(task, rounds, ready)

    def _lacks(self, rounds: _Rounds, message: ContributionsMissing) -> None:
        if rounds.meeting is not None and rounds.meeting.attempt == message.attempt:
            self._leave_out(rounds, rounds.meeting, set(message.tasks))

    def _leave_out(self, rounds: _Rounds, meeting: _Meeting, tasks: set[int]) -> None:
        """Aborts a meeting so that the partners make the round without some tasks, if the rest is a quorum."""
        tasks &= meeting.ready.keys()
        if rounds.meeting is meeting and tasks and len(meeting.ready) - len(tasks) >= rounds.first.quorum:
            rounds.left_out |= tasks
            rounds.awaited -= tasks
            self._abort(rounds)

    def _abort(self, rounds: _Rounds) -> None:
        meeting, rounds.meeting = rounds.meeting, None
        assert meeting is not None
        for task in meeting.ready:
            self._tell(task, MeetingAborted(rounds.first.rounds, meeting.attempt))
        for task, request in meeting.have.items():
            self._answer(task, request, MeetingOutcome(False))
        self._look(rounds)

    # Calls of `fit`.

    def _reach(self, task: int, where: tuple[int, int]) -> None:
        self._at[task] = where
        self._furthest = max(self._furthest, where)
        for rounds in self._rounds.values():
            for said in (rounds.ready, rounds.late):  # otherwise a late task would make a last round by itself
                for member, ready in list(said.items()):
                    if ready.fit is not None and ready.fit < self._furthest[0]:
                        del said[member]
                        self._is_ready(member, rounds, ready)

    def _linger(self, task: int, message: FitEnded) -> None:
        self._lingering[task] = message

        def end() -> None:
            if self._lingering.get(task) is not message:
                return
            if any(self._of(name).fetching for name in message.rounds):
                self._linger(task, message)
            else:
                del self._lingering[task]
                self._answer(task, message.id, None)

        self._later(max([_LINGER_SECONDS, *(self._of(name).first.grace for name in message.rounds)]), end)

    def _release(self) -> None:
        """Answers the lingering tasks that may go: no other task needs their states, or they lack a state themselves.

        A task that lacks a newest state goes at once, even if others need its own states: it fetches that state and
        asks again. Otherwise two tasks that each need a state of the other would wait for each other.
        """
        for task, message in list(self._lingering.items()):
            all_rounds = [self._of(name) for name in message.rounds]
            if any(rounds.meeting is not None for rounds in all_rounds):
                continue
            lacking = [self._lacking(rounds, message.fit) for rounds in all_rounds]
            if any(task in tasks for tasks in lacking) or not any(lacking):
                del self._lingering[task]
                self._answer(task, message.id, None)

    def _lacking(self, rounds: _Rounds, fit: int) -> set[int]:
        """Returns the tasks within a call of `fit`, or at its end, that lack the newest state."""
        behind = {task for task in rounds.addresses if rounds.has.get(task, -1) < rounds.newest}
        return {task for task in behind if task in self._ending or self._at.get(task, (fit, 0))[0] <= fit}

    def _epoch_of(self, fit: int | None) -> int:
        if fit is not None and fit < self._furthest[0]:
            return -1
        return self._furthest[1] if fit == self._furthest[0] else 0

    def _answer(self, task: int, request: int, value: Any) -> None:
        self._tell(task, Reply(request, msgspec.to_builtins(value)))
