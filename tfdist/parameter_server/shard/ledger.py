"""Which pushes a shard has counted: clocks, versions, duplicates, and who has to wait."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from tfdist.parameter_server.options.staleness import StalenessPolicy
from tfdist.parameter_server.options.synchronization import Synchronization
from tfdist.parameter_server.protocol.messages import Decision

Round = tuple[int, int]
"""The number of calls of `fit` before it, and the number of steps in this one. Workers may make different numbers."""


@dataclass
class Worker:
    """A live worker, as its shard knows it.

    Attributes:
        clock: the number of steps that it has pushed.
        round: where there are rounds, that of its next push.
        sequence: of its last push that was counted; pushes with this number or a lower one are duplicates.
        is_active: whether others wait for it. A worker that evaluates, saves or traces is not waited for.
        suspended: the number of its last request that nobody waits for it; the same one may come twice.
    """

    clock: int
    round: Round
    sequence: int = -1
    is_active: bool = False
    suspended: int = -1


@dataclass(frozen=True)
class Gradient:
    """A push that waits to be averaged.

    Attributes:
        worker: who pushed it.
        sequence: of the push.
        round: where there are rounds, the one that it belongs to.
        samples: its weight in the average.
        staleness: updates between its read and its push.
        scale: by the staleness policy.
        peers: the workers of the round, where another server has decided that; see `Ledger.follow`.
    """

    worker: int
    sequence: int
    round: Round
    samples: float
    staleness: int
    scale: float
    peers: tuple[int, ...] = ()


@dataclass
class Ledger:
    """The bookkeeping of one shard, without its values.

    Attributes:
        synchronization: when updates are applied.
        policy: what late gradients are worth.
        version: the number of updates that were applied.
        awaited: workers that the job names and that have not entered yet; rounds wait for them.
        idle: workers that have no batch and wait for one: no round waits for them.
        workers: the live ones, by number.
        waiting: gradients that are not applied yet, in the order in which they came.
        round: whose gradients are averaged, where there are rounds.
        done: the last rounds that another server has decided and that are applied.
        counted: by worker, its pushes that were counted, also of those that have left.
        dropped: by worker, its pushes that were dropped.
        staleness: how many pushes had which staleness.
    """

    synchronization: Synchronization
    policy: StalenessPolicy
    version: int = 0
    awaited: set[int] = field(default_factory=set)
    idle: frozenset[int] = frozenset()
    workers: dict[int, Worker] = field(default_factory=dict)
    waiting: list[Gradient] = field(default_factory=list)
    round: Round = (0, 0)
    done: deque[Round] = field(default_factory=lambda: deque(maxlen=64))
    counted: Counter[int] = field(default_factory=Counter)
    dropped: Counter[int] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)

    def enter(self, worker: int, sequence: int = -1) -> int:
        """Takes a worker in, or in again. It begins with the clock of the slowest one, so that nobody waits for it.

        Args:
            worker: its number.
            sequence: of its last push, if this shard has counted pushes of it.

        Returns:
            Its clock.
        """
        self.awaited.discard(worker)
        self.workers.pop(worker, None)
        one = self.workers[worker] = Worker(self.slowest(), self.round, sequence)
        if any(gradient.worker == worker and gradient.round == self.round for gradient in self.waiting):
            one.round = _next(self.round)  # it has a part in this one already
        return one.clock

    def leave(self, worker: int) -> None:
        """Nobody waits for a worker any more. What it has pushed counts."""
        self.awaited.discard(worker)
        self.workers.pop(worker, None)

    def suspend(self, worker: int, is_end: bool = False, number: int | None = None) -> None:
        """Nobody waits for a worker until it pushes again. In rounds everybody does, until a call of `fit` ends.

        Args:
            worker: its number.
            is_end: whether a call of `fit` has ended.
            number: of the request; one that is not higher than all before has been heard already.
        """
        one = self.workers[worker]
        if number is not None:
            if number <= one.suspended:
                return
            one.suspended = number
        if not self.synchronization.in_rounds:
            one.is_active = False
        elif is_end:
            one.round = (one.round[0] + 1, 0)

    def set_idle(self, workers: frozenset[int]) -> None:
        """Notes which workers have no batch and wait for one. Those that have one again join the current round.

        Args:
            workers: all of them, also some that have not entered.
        """
        for worker in self.idle - workers:
            if worker in self.workers:
                one = self.workers[worker]
                one.round = max(one.round, self.round)
        self.awaited -= workers  # they have come, and may never get a batch to enter with
        self.idle = workers

    def resume(self, worker: int) -> int:
        """A worker goes on; if all others are further by now, with the clock of the slowest one.

        Returns:
            Its clock.
        """
        one = self.workers[worker]
        if not one.is_active:
            one.clock = max(one.clock, self.slowest())
            one.is_active = True
        return one.clock

    def slowest(self) -> int:
        """The lowest clock of a worker that others wait for; without any, the highest one, or 0."""
        active = [one.clock for one in self.workers.values() if one.is_active]
        return min(active) if active else max((one.clock for one in self.workers.values()), default=0)

    def is_duplicate(self, worker: int, sequence: int) -> bool:
        """Whether a push has been counted already."""
        return sequence <= self.workers[worker].sequence

    def push(self, worker: int, sequence: int, clock: int, read: int, samples: float) -> Gradient | None:
        """Counts a push that is no duplicate.

        Args:
            worker: who pushes; it is live.
            sequence: number of the push, higher than all before.
            clock: of its step.
            read: the version that the worker's parameters had.
            samples: its weight.

        Returns:
            The gradient to keep until it is applied; None if it is dropped.
        """
        one = self.workers[worker]
        staleness = max(0, self.version - read)
        scale = self.policy.scale(staleness)
        of = one.round
        if self.synchronization.in_rounds:  # one that is late goes on with the round of the others
            one.sequence, one.clock, one.round = sequence, one.clock + 1, max(_next(of), self.round)
            scale = None if of < self.round else scale or 0.0  # the round has to become complete
        else:
            one.sequence, one.clock = sequence, max(clock, self.resume(worker)) + 1
        if scale is None:
            self.dropped[worker] += 1
            return None
        self.counted[worker] += 1
        self.staleness[staleness] += 1
        gradient = Gradient(worker, sequence, of, samples, staleness, scale)
        self.waiting.append(gradient)
        return gradient

    def follow(self, worker: int, sequence: int, read: int, samples: float, decision: Decision) -> Gradient:
        """Counts a push that is no duplicate as another server has counted it.

        Args:
            worker: who pushes; it is live.
            sequence: as of `push`.
            read: as of `push`.
            samples: as of `push`.
            decision: of the other server.

        Returns:
            The gradient to keep until it is applied.
        """
        one = self.workers[worker]
        one.sequence = sequence
        if decision.clock is not None:
            one.clock, one.is_active = decision.clock, True
        of = decision.round or one.round
        if self.synchronization.in_rounds:
            one.round = max(one.round, _next(of))
        staleness = max(0, self.version - read)
        self.counted[worker] += 1
        self.staleness[staleness] += 1
        peers = (worker,) if of in self.done else decision.peers  # the others did not wait, as it was lost for a while
        gradient = Gradient(worker, sequence, of, samples, staleness, decision.scale, peers)
        self.waiting.append(gradient)
        return gradient

    def due(self) -> list[Gradient]:
        """The gradients that make the next update; empty while some are missing. Taken out of those that wait."""
        if decided := [gradient for gradient in self.waiting if gradient.peers]:
            rounds = sorted({gradient.round for gradient in decided})
            of = next((one for one in rounds if not self._missing(one)), rounds[0])
            ready = [gradient for gradient in self.waiting if gradient.round == of]
            later = [gradient for gradient in self.waiting if gradient.round != of]
            is_due = not self._missing(of)
        elif self.synchronization.in_rounds:
            self._begin_fit()
            ready = [gradient for gradient in self.waiting if gradient.round == self.round]
            later = [gradient for gradient in self.waiting if gradient.round != self.round]
            members = self._members() - self.idle
            there = members & {gradient.worker for gradient in ready}
            quorum = min(len(members), self.synchronization.quorum(max(1, len(members))))
            is_due = bool(ready) and len(there) >= quorum
        else:
            quorum = self.synchronization.quorum(max(1, len(self.workers)))
            ready, later = self.waiting[:quorum], self.waiting[quorum:]
            is_due = len(ready) >= quorum
        if not is_due:
            return []
        self.waiting = later
        self.version += 1
        if decided:
            self.round = max(self.round, _next(of))
            self.done.append(of)
        elif self.synchronization.in_rounds:
            self.round = _next(self.round)
        return ready

    def may_read(self, worker: int) -> bool:
        """Whether a worker may have the parameters for its next step."""
        if self.synchronization.in_rounds:
            return all(one.worker != worker for one in self.waiting)
        lead = self.synchronization.lead()
        return lead is None or self.slowest() >= self.workers[worker].clock - lead

    def awaited_by(self, worker: int) -> set[int]:
        """The workers because of which another one may not read."""
        if self.may_read(worker):
            return set()
        own = next((one for one in self.waiting if one.worker == worker and one.peers), None)
        if own is not None:
            return self._missing(own.round)
        if self.synchronization.in_rounds:
            return self._members() - self.idle - {one.worker for one in self.waiting if one.round == self.round}
        return {number for number, one in self.workers.items() if one.is_active and one.clock == self.slowest()}

    def _missing(self, of: Round) -> set[int]:
        """The live workers of a round that another server has decided whose gradients are not there yet."""
        there = [one for one in self.waiting if one.round == of]
        peers = {worker for one in there for worker in one.peers}
        return (peers & self.workers.keys()) - {one.worker for one in there}

    def _members(self) -> set[int]:
        """The workers that the round is of: those that have not finished this call of `fit`."""
        return self.awaited | {number for number, one in self.workers.items() if one.round[0] <= self.round[0]}

    def _begin_fit(self) -> None:
        """Goes on to the next call of `fit` when all have finished the last one, and what they gave is applied."""
        if self.workers and not self._members() and all(one.round != self.round for one in self.waiting):
            self.round = min(one.round[0] for one in self.workers.values()), 0


def _next(of: Round) -> Round:
    return of[0], of[1] + 1


def weights(gradients: list[Gradient]) -> list[float]:
    """The factor of each gradient in the average: its scale, and its samples among those of all."""
    samples = sum(gradient.samples for gradient in gradients)
    if not samples:
        return [gradient.scale / len(gradients) for gradient in gradients]
    return [gradient.scale * gradient.samples / samples for gradient in gradients]
