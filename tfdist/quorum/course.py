"""The course of rounds for which a quorum is enough, of one optimizer's values or of layers' state."""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.compression.policy import Policy
from tfdist.errors import MismatchError, RendezvousError
from tfdist.local_sgd.course import Course, Courses, JoinedRounds, Progress, RoundResult, Turn, VariableGroup
from tfdist.local_sgd.intervals import Interval
from tfdist.local_sgd.rules import Rule, restore
from tfdist.quorum.contributions import ContributionEncoder
from tfdist.quorum.exchange import AbortedError, MeetingExchange
from tfdist.quorum.members import Members
from tfdist.quorum.messages import FetchedState
from tfdist.quorum.rates import Rates, rates_before_epoch

log = logging.getLogger("tfdist")

_AGAIN_SECONDS = 0.1


@dataclass
class Totals:
    """Totals over the rounds of this process.

    Attributes:
        rounds: number of rounds in which this process has taken part.
        seconds: seconds spent in rounds, including the wait for others.
    """

    rounds: int = 0
    seconds: float = 0.0


class QuorumRounds(Course):
    """The course of the rounds of some values.

    At the beginning of a round the processes that meet have a common centre. Each contributes the difference between
    its values and the centre, and a rule computes the new centre from the mean difference. A process that misses a
    round takes the new centre from another process, adds its own difference to it, and contributes that to the next
    round.

    Args:
        members: access to the processes that meet.
        interval: number of steps of a round.
        rule: rule that computes the new centre.
        compression: policy by which differences are compressed; None for no compression.
        trained: the values that are exchanged.
        settings: description of the settings, which must be the same on all processes.
        are_weights: whether the values are weights, not statistics of layers. Rounds of weights need a quorum, and
            changes that come too late for a round are contributed to the next one. Late changes are relative to an old
            centre, by which statistics cannot be corrected. Statistics are exchanged at an epoch's end, which some
            processes reach a step earlier than others, so they must not wait for a quorum.
        totals: totals to which the course adds; by default its own.

    Attributes:
        ended: whether an epoch of another process, but none of this one's, ended with the last round.
        totals: totals over the rounds of this process.
        is_over: whether the others have ended this process's call of `fit`. Its values are then those of the centre.

    Raises:
        RendezvousError: no process had a state in time.
        MismatchError: the settings or the variables differ from those of the others.
    """

    turns = 1

    def __init__(
        self,
        members: Members,
        interval: Interval,
        rule: Rule,
        compression: Policy | None,
        trained: VariableGroup,
        settings: str,
        are_weights: bool = True,
        totals: Totals | None = None,
    ) -> None:
        assert trained.live is not None
        self.centre = trained.centre
        self.ended = self.is_over = False
        self.totals = Totals() if totals is None else totals
        self._members, self._interval, self._rule, self._trained = members, interval, rule, trained
        self._live = trained.live
        shapes = [value.shape for value in trained.centre]
        self._contributions = ContributionEncoder(trained.paths[: len(shapes)], shapes, compression, members.task)
        form = [(value.dtype.name, value.shape) for value in trained.centre]
        self._settings = f"{settings}, {len(form)} variables (form {zlib.crc32(repr(form).encode()):08x})"
        self._are_weights = are_weights
        self.learning_rate = trained.learning_rate
        self._rates = Rates()
        self._last = Progress(0, 0)
        self._settled = 0  # step at which no changes were left, or they were kept for later
        self._epoch_began = trained.live.step() if members.is_in_epoch else None  # step, within an epoch of `fit`
        self._before = list(trained.centre)
        self._begun: tuple[int, list[np.ndarray]] | None = None  # step and optimizer's state before the first round
        self._carry: list[np.ndarray] | None = None
        self._staleness: Counter[int] = Counter()
        self._missed = 0
        self._lock = threading.Lock()  # guards the state that others fetch
        self._round = -1
        self._first: int | None = None
        self._is_joining = False
        members.offer(trained.name, self)
        self.refresh()

    @property
    def staleness(self) -> Counter[int]:
        """How often this process's contributions were late, by number of rounds; see `Course`."""
        return Counter(self._staleness)

    @property
    def rules(self) -> list[tuple[Rule, list[np.ndarray]]]:
        """The rule, with all values in the centre."""
        return [(self._rule, list(self.centre))]

    @property
    def name(self) -> str:
        """Name of the rounds."""
        return self._trained.name

    @property
    def round(self) -> int:
        """Number of the round that the centre comes from."""
        return self._round

    def places(self, what: int) -> list[int]:
        """Returns the indices of all values; see `Course`."""
        return list(range(len(self.centre)))

    def assigned(self, place: int, value: np.ndarray, progress: Progress) -> None:
        """Replaces a value in the centre, and drops late changes; see `Course`."""
        with self._lock:
            self.centre[place] = np.array(value)
        self._carry = None

    def begin_anew(self, progress: Progress) -> Turn:
        """Begins a round, which ends with that of the others if their state was taken over; see `Course`."""
        if self._carry is None:
            self._last = progress
        begun = None if self._round else (progress.step, self._live.state())
        with self._lock:
            self._begun = begun
        self._settled = progress.step
        left, self._first = self._first, None
        self._is_joining = left is not None
        self.ended = False
        return Turn(max(1, left), 0) if left is not None else self._next(progress.step)

    def first(self, step: int) -> Turn | None:
        """Returns the first action; None if the round ends with that of the others; see `Course`."""
        return None if self._is_joining else self._next(step)

    def _next(self, step: int) -> Turn:
        return Turn(self._interval.steps(step, self.learning_rate), 0)

    # Rounds.

    def take(
        self, what: int, progress: Progress, learning_rate: float, values: Sequence[np.ndarray]
    ) -> tuple[Turn, list[np.ndarray]]:
        """Takes part in a round, or adds this process's changes to the centre of a missed one; see `Course`."""
        self.learning_rate = learning_rate
        changes = self._changes(values)
        left = self._timed(progress, changes, ends=False)
        if left is None:
            return self._next(progress.step), self._own(values)
        self._carry = None  # the values that are returned contain it
        if self.is_over:
            return Turn(max(1, left), 0), [np.array(value) for value in self.centre]
        return Turn(max(1, left), 0), [value + change for value, change in zip(self.centre, changes, strict=True)]

    def settle(self, progress: Progress, values: Sequence[np.ndarray]) -> RoundResult:
        """Takes part in a round that ends an epoch, or keeps late changes for the next one; see `Course`."""
        has_ended = self.ended or self.is_over or self._members.is_behind
        tells = self._epoch_began is not None and progress.step > self._epoch_began and not has_ended
        self._epoch_began = None
        if progress.step == self._settled and not tells:
            return RoundResult(progress.step, list(values), False)
        changes = self._changes(values)
        if has_ended:  # the others may be in the middle of a later epoch
            newest = self._newest()
            left: int | None = self._live.left() if newest is None else newest[0].left
        else:
            left = self._timed(progress, changes, ends=True)
        if left is not None:
            self._carry = changes if self._are_weights and not self.is_over else None
            self._first = left
            self._settled = progress.step
        return RoundResult(progress.step, [np.array(value) for value in self.centre], True)

    def _changes(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        changes = [np.asarray(value - array) for value, array in zip(values, self.centre, strict=True)]
        if self._carry is not None:
            changes = [array + kept for array, kept in zip(changes, self._carry, strict=True)]
        return changes

    def _own(self, values: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [np.asarray(array) for array in self._rule.own(values, self._before, list(self.centre))]

    def _timed(self, progress: Progress, changes: list[np.ndarray], ends: bool) -> int | None:
        begin = time.monotonic()
        try:
            return self._meet(progress, changes, ends)
        finally:
            self.totals.seconds += time.monotonic() - begin

    def _meet(self, progress: Progress, changes: list[np.ndarray], ends: bool) -> int | None:
        """Meets others until a round counts, with this process or without it.

        Args:
            progress: progress of this process.
            changes: changes that this process contributes.
            ends: whether the epoch of this process has ended.

        Returns:
            None if a round with its changes counts. If a round counts without them, the number of steps until the
                processes that made it are ready for the next round.
        """
        members, name, number = self._members, self._trained.name, self._round + 1
        samples = progress.samples - self._last.samples
        contribution, checksum = None, self._checksum()
        while True:
            meeting = members.ready(name, number, samples, ends, checksum)
            if not meeting.partners:
                if contribution is not None:
                    self._contributions.take_back()
                self.is_over |= meeting.over
                if meeting.astray:
                    self._forget()
                newest = self._newest()
                if newest is not None:
                    return newest[0].left
                if meeting.over:
                    return 1
                contribution = None
                number = self._round + 1  # the process that had a newer state is lost
                continue
            # All partners may come to end an epoch just after a round: the rule must not take a step for that.
            has_changes = any(partner.samples for partner in meeting.partners) or not self._are_weights
            if has_changes and contribution is None:
                contribution = self._contributions.encode(changes, number)
                if not samples:  # of no weight, so what compression keeps for later is not in it
                    self._contributions.take_back()
            try:
                exchange = MeetingExchange(members, name, meeting)
                mean = self._contributions.mean(contribution, exchange) if has_changes and contribution else None
            except AbortedError:
                continue
            outcome = members.have(name, meeting.attempt)
            if outcome.counts:
                break
        with self._lock:
            self._before = list(self.centre)
            for place, value in enumerate([] if mean is None else self._rule.centre(self._before, mean)):
                self.centre[place] = np.asarray(value)
            self._round, self._begun = number, None
        if mean is not None:
            self._staleness[self._missed] += 1
            self.totals.rounds += 1
            self._missed = 0
        self._last, self._settled = progress, progress.step
        self._carry = None
        self.ended = outcome.ends and not ends
        return None

    # States.

    def state(self, request: int) -> tuple[FetchedState, list[np.ndarray]]:
        """Returns the state that another process has requested; see `tfdist.quorum.links.StateSource`."""
        live = self._live
        with self._lock:
            centre, rule, number, begun = list(self.centre), self._rule.state(), self._round, self._begun
        # All processes take all steps of the first round, whenever they join.
        step, inner = (live.step(), live.state()) if number or begun is None else begun
        with self._lock:  # after `inner` is read: if callbacks have set its rate, the rate before them has been noted
            epoch, rates = self._rates.epoch, self._rates.of_epochs
        counts = len(centre), len(rule), len(inner)
        return FetchedState(request, number, live.left(), step, counts, epoch, rates), [*centre, *rule, *inner]

    def _newest(self) -> tuple[FetchedState, list[np.ndarray]] | None:
        """Takes over the newest state from another process.

        Returns:
            The other process's answer, and the state of its optimizer; None if this process has the newest state.

        Raises:
            RendezvousError: no process had a state in time, or gave it in time.
            MismatchError: the other process has other settings or another model.
        """
        members, name = self._members, self._trained.name
        end = time.monotonic() + members.patience
        while True:
            reply = members.enlist(name, self._round, self._settings, self._are_weights)
            if reply.lost:
                log.warning(
                    "tfdist: task %d goes on with the values of %s of round %d: all tasks that had those of round %d "
                    "are lost or have ended.",
                    *(members.task, name, reply.round, reply.round + reply.lost),
                )
            if reply.source is None:
                self._round = reply.round
                return None
            fetched = members.fetch(reply.source, reply.address, name)
            if fetched is not None and fetched[0].round > self._round:
                break
            if time.monotonic() > end:
                raise RendezvousError(
                    f"task {reply.source} has the state of {name} of round {reply.round}, but did not send it from "
                    f"{reply.address} within {members.patience:g} s. Check that no firewall is between the tasks, "
                    "which connect to each other on ports that the system chooses."
                )
            time.sleep(_AGAIN_SECONDS)  # the source is lost, which the server will soon notice, or is just starting
        state, arrays = fetched
        centre, rule, of_optimizer = _divided(arrays, state.parts)
        self._check(centre, reply.source)
        with self._lock:
            for place, value in enumerate(centre):
                self.centre[place] = value
            self._rule.restore(rule, centre)
            self._missed += state.round - self._round if self._round >= 0 else 0
            self._round = state.round
        return state, of_optimizer

    def _check(self, centre: Sequence[np.ndarray], source: int) -> None:
        form = [(array.dtype.name, array.shape) for array in centre]
        known = [(array.dtype.name, array.shape) for array in self.centre]
        if form != known:
            raise MismatchError(
                f"task {source} has other variables in {self._trained.name}: {form[:3]}…; this task has {known[:3]}…. "
                "Every task must build the same model."
            )

    def refresh(self) -> bool:
        """Registers this process for the next round; takes over the newest state if another process has it.

        Returns:
            Whether another process has it; then `joined` holds the state that the optimizer begins with.
        """
        newest = self._newest()
        self.joined = None
        if newest is not None:
            state, of_optimizer = newest
            to_begin = self._members.epoch + 1 if self._members.is_in_epoch else state.epoch
            rates = rates_before_epoch(to_begin, state.epoch, state.rates)
            self.joined = JoinedRounds(state.step, of_optimizer, rates, state.epoch)
            self._first = state.left if state.round else None  # all processes take the whole first round
        return newest is not None

    def begin_epoch(self, epoch: int) -> None:
        """Notes the learning rates for processes that join later; called before callbacks.

        Args:
            epoch: number of the epoch.
        """
        self._epoch_began = self._live.step()
        with self._lock:
            self._rates.begin_epoch(epoch, self._live.rates())

    def end_fit(self) -> None:
        """Forgets the state of a call of `fit`."""
        self.is_over = False
        self._epoch_began = None
        with self._lock:
            self._rates.end_fit()

    def replace(self) -> None:
        """Makes this process's state, to which its program has assigned values, that of all processes."""
        self._round = self._members.replace(self._trained.name)

    def follow(self, seconds: float) -> bool:
        """Waits for the state that another process makes that of all by `replace`, and takes it over.

        Changes that came too late for a round are dropped.

        Args:
            seconds: maximum time to wait, in seconds.

        Returns:
            Whether a state was taken over; then `joined` holds the state that the optimizer begins with.
        """
        self._carry = None
        end = time.monotonic() + seconds
        while not self.refresh():
            if time.monotonic() > end:
                return False
            time.sleep(_AGAIN_SECONDS)
        return True

    def _checksum(self) -> int:
        checksum = 0
        for value in self.centre:
            checksum = zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data, checksum)
        return checksum

    def _forget(self) -> None:
        log.warning(
            "tfdist: task %d has other values of %s than the other tasks, and takes over theirs. Give variables "
            "the same values on all tasks.",
            self._members.task,
            self._trained.name,
        )
        with self._lock:
            self._round = -1


def _divided(arrays: Sequence[np.ndarray], counts: Sequence[int]) -> list[list[np.ndarray]]:
    parts, begin = [], 0
    for count in counts:
        parts.append(list(arrays[begin : begin + count]))
        begin += count
    return parts


class QuorumRoundsFactory(Courses):
    """Makes the `QuorumRounds` of each optimizer.

    Args:
        members: access to the processes that meet.
        interval: number of steps of a round.
        rule: makes the rule of an optimizer's rounds.
        compression: policy by which differences are compressed; None for no compression.
        described: description of the strategy's arguments, which must be the same on all processes.

    Attributes:
        totals: totals over the rounds of all optimizers.
    """

    def __init__(
        self,
        members: Members,
        interval: Interval,
        rule: Callable[[], Rule],
        compression: Policy | None,
        described: str,
    ) -> None:
        self.members = members
        self.totals = Totals()
        self._interval, self._rule, self._compression = interval, rule, compression
        self.described = described

    def of(self, trained: VariableGroup) -> QuorumRounds:
        """Returns the course of an optimizer; see `Courses`."""
        rule = self._rule()
        restore([(rule, trained.centre)], trained.rules)
        of_all = self.members, self._interval, rule, self._compression, trained, self.described
        return QuorumRounds(*of_all, totals=self.totals)

    def of_state(self, trained: VariableGroup, rule: Rule) -> QuorumRounds:
        """Returns the course of the state of layers, which is exchanged when an epoch ends.

        Args:
            trained: the values that are exchanged.
            rule: rule of their rounds.
        """
        return QuorumRounds(self.members, self._interval, rule, None, trained, self.described, are_weights=False)
