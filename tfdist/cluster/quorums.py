"""What the rendezvous server knows about rounds that need a quorum of the training tasks, not all of them.

A round *begins* when all tasks that are awaited are ready for it, or, once a quorum is, after a time of grace. Those
that are ready then *meet*: they exchange what they have learned, and each says when it has it all. The meeting counts
when all have said so; if one of them is lost before, it counts for nobody, and the others meet again without it. As
this server alone decides, no two parts of the job can go on with different states.

A partner of which nothing comes, or that does not say that it has everything, is left out after the time of grace: the
others make the round without it, and it is not in another meeting for that round, unless the quorum needs it.

All who meet have the same state, which checksums show. If one has another state of the same round, since its program
has given variables other values than the others' have, it takes that of the task which has been there longest. A task
may also give its own state to all: it counts as that of a round of its own.

A task that a round was made without is not awaited again before it has shown up. It takes the newest state from a task
that has it; so does one that comes anew. If nobody has a state, the chief begins with its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tfdist.cluster.message import Message
from tfdist.cluster.messages import Reply
from tfdist.cluster.quorum_messages import (
    Aborted,
    Enlist,
    Enlisted,
    Epoch,
    Have,
    Lack,
    Linger,
    Meeting,
    OfRounds,
    Outcome,
    Partner,
    Ready,
    Replace,
    Where,
)

_CHIEF = 0
_LINGER_SECONDS = 10.0
"""For which a task stays for others at least, as a short time of grace is for rounds, not for who is on its way."""


@dataclass
class _Meeting:
    """A meeting under way.

    Attributes:
        attempt: its number.
        ready: what each of those who meet has said when it was ready.
        have: the requests of those that have all they need.
    """

    attempt: int
    ready: dict[int, Ready]
    have: dict[int, int] = field(default_factory=dict)


@dataclass
class _Rounds:
    """The rounds of one name.

    Attributes:
        first: what the first task has enlisted with.
        has: the round of the state that each task has.
        addresses: of the tasks.
        awaited: tasks that the next round waits for.
        waiting: requests of tasks that have no state, while nobody has one.
        ready: what tasks have said that are ready for the next round.
        left_out: tasks that the next round is to be made without.
        late: what they have said when they were ready for it.
        meeting: that is under way.
        attempts: how many meetings there were.
        patience: numbers the times of grace; one that is not the last is over.
    """

    first: Enlist
    has: dict[int, int] = field(default_factory=dict)
    addresses: dict[int, str] = field(default_factory=dict)
    awaited: set[int] = field(default_factory=set)
    waiting: dict[int, int] = field(default_factory=dict)
    ready: dict[int, Ready] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    late: dict[int, Ready] = field(default_factory=dict)
    meeting: _Meeting | None = None
    attempts: int = 0
    patience: int = 0
    is_patient: bool = False

    @property
    def newest(self) -> int:
        """The round of the newest state; -1 if nobody has one."""
        return max(self.has.values(), default=-1)


_NONE = _Rounds(Enlist(0, "", "", -1, 1, 0.0, ""))
"""Of a name that nobody has enlisted for; nobody takes part in them."""


class Quorums:
    """The bookkeeping, without a connection of its own.

    Args:
        tell: sends a message to a task.
        later: calls back after some seconds.
        start_timeout: seconds for the chief to begin, if it is there.
    """

    def __init__(
        self,
        tell: Callable[[int, Message], None],
        later: Callable[[float, Callable[[], None]], Any],
        start_timeout: float,
    ) -> None:
        self._tell = tell
        self._later = later
        self._start_timeout = start_timeout
        self._rounds: dict[str, _Rounds] = {}
        self._furthest = (0, 0)
        self._at: dict[int, tuple[int, int]] = {}  # the call of `fit` and the epoch of each task
        self._lingering: dict[int, Linger] = {}
        self._ending: set[int] = set()  # tasks that have ended `fit`, and get the newest states before they go on
        self._chief_is_there = False

    def heard(self, task: int, message: OfRounds) -> None:
        """Takes a task's message."""
        match message:
            case Enlist():
                self._enlist(task, message)
            case Where(request, fit):
                self._answer(task, request, self._epoch_of(fit))
            case Epoch(fit, epoch):
                self._ending.discard(task)
                self._reach(task, (fit, epoch))
            case Linger():
                self._ending.add(task)
                self._reach(task, (message.fit + 1, 0))
                self._linger(task, message)
            case Ready() | Have() | Lack() | Replace() if task in self._of(message.rounds).addresses:
                self._of_a_round(task, self._rounds[message.rounds], message)
        self._release()

    def _of(self, rounds: str) -> _Rounds:
        return self._rounds.get(rounds, _NONE)

    def _of_a_round(self, task: int, rounds: _Rounds, message: Ready | Have | Lack | Replace) -> None:
        match message:
            case Ready():
                self._is_ready(task, rounds, message)
            case Have():
                self._has(task, rounds, message)
            case Lack():
                self._lacks(rounds, message)
            case Replace():
                self._replace(task, rounds, message)

    def came(self, task: int) -> None:
        """A task is there, perhaps again."""
        self._chief_is_there |= task == _CHIEF

    def gone(self, task: int, lost: bool) -> None:
        """A task is not there any more.

        Args:
            task: its number.
            lost: whether it may come again, as its script has not ended.
        """
        self._chief_is_there &= task != _CHIEF
        self._at.pop(task, None)
        self._lingering.pop(task, None)
        self._ending.discard(task)
        for rounds in self._rounds.values():
            for kept in (rounds.has, rounds.addresses, rounds.waiting, rounds.ready, rounds.late):
                kept.pop(task, None)
            rounds.awaited.discard(task)
            rounds.left_out.discard(task)
            meeting = rounds.meeting
            if meeting is not None and task in meeting.ready and task not in meeting.have:
                self._abort(rounds)
            self._look(rounds)
            if not rounds.has:
                self._begin_without_the_chief(rounds)
        if lost and not any(rounds.has for rounds in self._rounds.values()):
            self._furthest = (0, 0)  # who comes now begins anew
        self._release()

    # States.

    def _enlist(self, task: int, message: Enlist) -> None:
        rounds = self._rounds.setdefault(message.rounds, _Rounds(message))
        own, first = ((one.quorum, one.grace, one.settings) for one in (message, rounds.first))
        if own != first:
            error = (
                f"task {task} has quorum={own[0]}, grace={own[1]:g}, {own[2]}; the others have quorum={first[0]}, "
                f"grace={first[1]:g}, {first[2]}. Give every task the same arguments and the same model."
            )
            self._tell(task, Reply(message.id, error=error))
            return
        rounds.addresses[task] = message.address
        rounds.has.pop(task, None)
        if message.round >= 0:
            rounds.has[task] = message.round
        if rounds.newest < 1 or message.round == rounds.newest:
            rounds.awaited.add(task)  # others may need long for their first step
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
        sources = [one for one, has in rounds.has.items() if has == newest]
        source = None if task in sources else sources[0]
        address = "" if source is None else rounds.addresses[source]
        self._answer(task, request, Enlisted(newest, source, address))

    def _replace(self, task: int, rounds: _Rounds, message: Replace) -> None:
        """A task's own state becomes the newest one."""
        rounds.has[task] = rounds.newest + 1
        self._answer(task, message.id, rounds.has[task])
        self._begin_again(rounds)
        if rounds.meeting is not None:
            self._abort(rounds)

    def _begin_with(self, task: int, rounds: _Rounds) -> None:
        """A task's own state becomes that of all."""
        rounds.has[task] = 0
        while rounds.waiting:
            self._point(*rounds.waiting.popitem(), rounds)

    def _begin_without_the_chief(self, rounds: _Rounds) -> None:
        """If the chief, which may have a backup, does not come, another task begins."""

        def begin() -> None:
            if rounds.waiting and not rounds.has:
                self._begin_with(min(rounds.waiting), rounds)

        if rounds.waiting:
            self._later(self._start_timeout if self._chief_is_there else rounds.first.grace, begin)

    # Rounds.

    def _is_ready(self, task: int, rounds: _Rounds, message: Ready) -> None:
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
            rounds.ready.update(rounds.late)  # there are too few without them
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
        """Has those take the others' state that have gone astray; whether there are some."""
        oldest = next(task for task in rounds.addresses if task in rounds.ready)  # they came in this order
        agreed = rounds.ready[oldest].checksum
        astray = {task: one for task, one in rounds.ready.items() if one.checksum != agreed}
        for task, one in astray.items():
            del rounds.ready[task]
            rounds.has.pop(task, None)
            self._answer(task, one.id, Meeting(astray=True, epoch=self._epoch_of(one.fit)))
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
            Partner(task, one.samples, rounds.addresses[task]) for task, one in sorted(meeting.ready.items())
        )
        for task, one in meeting.ready.items():
            self._answer(task, one.id, Meeting(meeting.attempt, partners, epoch=self._epoch_of(one.fit)))

    def _has(self, task: int, rounds: _Rounds, message: Have) -> None:
        meeting = rounds.meeting
        if meeting is None or meeting.attempt != message.attempt or task not in meeting.ready:
            self._answer(task, message.id, Outcome(False))
            return
        meeting.have[task] = message.id
        if len(meeting.have) == 1:
            self._later(
                rounds.first.grace, lambda: self._leave_out(rounds, meeting, meeting.ready.keys() - meeting.have)
            )
        if meeting.have.keys() == meeting.ready.keys():
            rounds.meeting = None
            ends = any(one.ends for one in meeting.ready.values())
            for one, request in meeting.have.items():
                if one in rounds.addresses:
                    rounds.has[one] = meeting.ready[one].round
                self._answer(one, request, Outcome(True, ends))
            self._begin_again(rounds)

    def _begin_again(self, rounds: _Rounds) -> None:
        """Looks anew at those who are ready, for a round that may have been made without them."""
        waiting = rounds.ready | rounds.late
        rounds.ready, rounds.late, rounds.left_out = {}, {}, set()
        for task, ready in waiting.items():
            self._is_ready(task, rounds, ready)

    def _lacks(self, rounds: _Rounds, message: Lack) -> None:
        if rounds.meeting is not None and rounds.meeting.attempt == message.attempt:
            self._leave_out(rounds, rounds.meeting, set(message.tasks))

    def _leave_out(self, rounds: _Rounds, meeting: _Meeting, tasks: set[int]) -> None:
        """Has the other partners make a round without some of them, if they are enough."""
        tasks &= meeting.ready.keys()
        if rounds.meeting is meeting and tasks and len(meeting.ready) - len(tasks) >= rounds.first.quorum:
            rounds.left_out |= tasks
            rounds.awaited -= tasks
            self._abort(rounds)

    def _abort(self, rounds: _Rounds) -> None:
        meeting, rounds.meeting = rounds.meeting, None
        assert meeting is not None
        for task in meeting.ready:
            self._tell(task, Aborted(rounds.first.rounds, meeting.attempt))
        for task, request in meeting.have.items():
            self._answer(task, request, Outcome(False))
        self._look(rounds)

    # Calls of `fit`.

    def _reach(self, task: int, where: tuple[int, int]) -> None:
        self._at[task] = where
        self._furthest = max(self._furthest, where)
        for rounds in self._rounds.values():
            for said in (rounds.ready, rounds.late):  # or one that is late would make a last round by itself
                for one, ready in list(said.items()):
                    if ready.fit is not None and ready.fit < self._furthest[0]:
                        del said[one]
                        self._is_ready(one, rounds, ready)

    def _linger(self, task: int, message: Linger) -> None:
        self._lingering[task] = message

        def end() -> None:
            if self._lingering.get(task) is message:
                del self._lingering[task]
                self._answer(task, message.id, None)

        self._later(max([_LINGER_SECONDS, *(self._of(name).first.grace for name in message.rounds)]), end)

    def _release(self) -> None:
        """Lets those go that neither wait for a newer state of the call of `fit` that they have ended, nor give theirs.

        Who lacks one of those that there are goes at once, whatever it has to give: it gets that, and comes back. Two
        of which each lacks what the other one has would wait for each other.
        """
        for task, message in list(self._lingering.items()):
            all_rounds = [self._of(name) for name in message.rounds]
            if any(one.meeting is not None for one in all_rounds):
                continue
            lacking = [self._lacking(one, message.fit) for one in all_rounds]
            if any(task in one for one in lacking) or not any(lacking):
                del self._lingering[task]
                self._answer(task, message.id, None)

    def _lacking(self, rounds: _Rounds, fit: int) -> set[int]:
        """Who lacks the newest state: within a call of `fit`, or at its end."""
        behind = {one for one in rounds.addresses if rounds.has.get(one, -1) < rounds.newest}
        return {one for one in behind if one in self._ending or self._at.get(one, (fit, 0))[0] <= fit}

    def _epoch_of(self, fit: int | None) -> int:
        if fit is not None and fit < self._furthest[0]:
            return -1
        return self._furthest[1] if fit == self._furthest[0] else 0

    def _answer(self, task: int, request: int, value: Any) -> None:
        self._tell(task, Reply(request, msgspec.to_builtins(value)))
