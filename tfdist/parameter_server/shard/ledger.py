"""Bookkeeping of a shard's pushes: clocks, versions, duplicates, and which workers have to wait."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from tfdist.parameter_server.options.synchronization import Synchronization
from tfdist.parameter_server.protocol.messages import Decision

Round = tuple[int, int]
"""Number of a round: earlier calls of `fit`, and earlier steps of this call. Workers may make different numbers."""


@dataclass
class Worker:
    """A live worker, as its shard knows it.

    Attributes:
        clock: the number of steps that the worker has pushed.
        round: round of its next push; used only where updates are made in rounds.
        sequence: number of its last push that was counted; pushes with this number or a lower one are duplicates.
        is_active: whether others wait for the worker. Nobody waits for one that evaluates, saves or traces.
        suspended: id of its last `Suspend` message, which may come twice.
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
        worker: number of the worker that pushed.
        sequence: number of the push.
        round: round that the push belongs to; used only where updates are made in rounds.
        samples: number of samples, the push's weight in the average.
        staleness: number of updates between the worker's read and its push.
        scale: factor of the gradients by the staleness policy.
        peers: workers of the round, if another server has decided them (`Ledger.follow`); else empty.
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
        synchronization: mode that says when updates are applied, and how late gradients are scaled.
        version: the number of updates that were applied.
        awaited: workers that the job names and that have not entered yet; rounds wait for them.
        idle: workers that have no batch and wait for one; no round waits for them.
        workers: the live workers, by number.
        waiting: gradients that are not applied yet, in order of arrival.
        round: the current round; used only where updates are made in rounds.
        done: the last applied rounds that another server has decided.
        counted: by worker, the number of pushes that were counted; workers that have left are included.
        dropped: by worker, the number of pushes that were dropped.
        staleness: histogram of the pushes' staleness.
    """

    synchronization: Synchronization
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
        """Adds a worker, or adds it again. Its clock starts at the slowest worker's, so that nobody waits for it.

        Args:
            worker: number of the worker.
            sequence: number of its last push that this shard has counted; -1 if there is none.

        Returns:
            The worker's clock.
        """
        self.awaited.discard(worker)
        self.workers.pop(worker, None)
        record = self.workers[worker] = Worker(self.slowest(), self.round, sequence)
        if any(gradient.worker == worker and gradient.round == self.round for gradient in self.waiting):
            record.round = _next(self.round)  # its push of the current round counts already
        return record.clock

    def leave(self, worker: int) -> None:
        """Stops waiting for a worker. Its pushes still count."""
        self.awaited.discard(worker)
        self.workers.pop(worker, None)

    def suspend(self, worker: int, is_end: bool = False, number: int | None = None) -> None:
        """Stops waiting for a worker until it pushes again. Rounds wait for it until its call of `fit` has ended.

        Args:
            worker: number of the worker.
            is_end: whether its call of `fit` has ended.
            number: id of the request; one that is not higher than all before is a duplicate.
        """
        record = self.workers[worker]
        if number is not None:
            if number <= record.suspended:
                return
            record.suspended = number
        if not self.synchronization.in_rounds:
            record.is_active = False
        elif is_end:
            record.round = (record.round[0] + 1, 0)

    def set_idle(self, workers: frozenset[int]) -> None:
        """Sets which workers have no batch and wait for one. A worker that has a batch again joins the current round.

        Args:
            workers: numbers of all such workers, also of some that have not entered.
        """
        for worker in self.idle - workers:
            if worker in self.workers:
                record = self.workers[worker]
                record.round = max(record.round, self.round)
        self.awaited -= workers  # they are there, but enter only with a batch, which may never come
        self.idle = workers

    def resume(self, worker: int) -> int:
        """Marks a worker as active. Its clock rises at least to the slowest active worker's.

        Returns:
            The worker's clock.
        """
        record = self.workers[worker]
        if not record.is_active:
            record.clock = max(record.clock, self.slowest())
            record.is_active = True
        return record.clock

    def slowest(self) -> int:
        """Returns the lowest clock of the active workers. Without any, it is the highest clock of all workers, or 0."""
        active = [worker.clock for worker in self.workers.values() if worker.is_active]
        return min(active) if active else max((worker.clock for worker in self.workers.values()), default=0)

    def is_duplicate(self, worker: int, sequence: int) -> bool:
        """Returns whether a push has been counted already."""
        return sequence <= self.workers[worker].sequence

    def push(self, worker: int, sequence: int, clock: int, read: int, samples: float) -> Gradient | None:
        """Counts a push that is no duplicate.

        Args:
            worker: number of the worker, which is live.
            sequence: number of the push, higher than all before.
            clock: the number of steps that the worker had finished before this one.
            read: version of the parameters that the gradients were computed at.
            samples: number of samples, the push's weight in an average.

        Returns:
            The gradient to keep until it is applied; None if the push is dropped.
        """
        record = self.workers[worker]
        staleness = max(0, self.version - read)
        scale = self.synchronization.late.scale(staleness)
        current = record.round
        if self.synchronization.in_rounds:  # a late worker goes on with the round of the others
            record.sequence, record.clock, record.round = sequence, record.clock + 1, max(_next(current), self.round)
            scale = None if current < self.round else scale or 0.0  # 0, not None: the round has to become complete
        else:
            record.sequence, record.clock = sequence, max(clock, self.resume(worker)) + 1
        if scale is None:
            self.dropped[worker] += 1
            return None
        self.counted[worker] += 1
        self.staleness[staleness] += 1
        gradient = Gradient(worker, sequence, current, samples, staleness, scale)
        self.waiting.append(gradient)
        return gradient

    def follow(self, worker: int, sequence: int, read: int, samples: float, decision: Decision) -> Gradient:
        """Counts a push that is no duplicate in the same way as the server with the dealer.

        Args:
            worker: number of the worker, which is live.
            sequence: number of the push, higher than all before.
            read: version of the parameters that the gradients were computed at.
            samples: number of samples, the push's weight in an average.
            decision: decision of the server with the dealer about this push.

        Returns:
            The gradient to keep until it is applied.
        """
        record = self.workers[worker]
        record.sequence = sequence
        if decision.clock is not None:
            record.clock, record.is_active = decision.clock, True
        current = decision.round or record.round
        if self.synchronization.in_rounds:
            record.round = max(record.round, _next(current))
        staleness = max(0, self.version - read)
        self.counted[worker] += 1
        self.staleness[staleness] += 1
        peers = (
            (worker,) if current in self.done else decision.peers
        )  # the round was applied while this worker was lost
        gradient = Gradient(worker, sequence, current, samples, staleness, decision.scale, peers)
        self.waiting.append(gradient)
        return gradient

    def due(self) -> list[Gradient]:
        """Removes and returns the waiting gradients that make the next update; returns none while some are missing."""
        if not self.waiting and not self.synchronization.in_rounds:
            return []
        if decided := [gradient for gradient in self.waiting if gradient.peers]:
            rounds = sorted({gradient.round for gradient in decided})
            first = next((number for number in rounds if not self._missing(number)), rounds[0])
            ready = [gradient for gradient in self.waiting if gradient.round == first]
            later = [gradient for gradient in self.waiting if gradient.round != first]
            is_due = not self._missing(first)
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
            self.round = max(self.round, _next(first))
            self.done.append(first)
        elif self.synchronization.in_rounds:
            self.round = _next(self.round)
        return ready

    def may_read(self, worker: int) -> bool:
        """Returns whether a worker may have the parameters for its next step."""
        if self.synchronization.in_rounds:
            return all(gradient.worker != worker for gradient in self.waiting)
        lead = self.synchronization.lead()
        return lead is None or self.slowest() >= self.workers[worker].clock - lead

    def awaited_by(self, worker: int) -> set[int]:
        """Returns the workers that a worker has to wait for before it may read."""
        if self.may_read(worker):
            return set()
        gradient = next((entry for entry in self.waiting if entry.worker == worker and entry.peers), None)
        if gradient is not None:
            return self._missing(gradient.round)
        if self.synchronization.in_rounds:
            return self._members() - self.idle - {entry.worker for entry in self.waiting if entry.round == self.round}
        return {number for number, entry in self.workers.items() if entry.is_active and entry.clock == self.slowest()}

    def _missing(self, number: Round) -> set[int]:
        """Returns the live workers whose gradients are missing in a round that another server has decided."""
        there = [gradient for gradient in self.waiting if gradient.round == number]
        peers = {worker for gradient in there for worker in gradient.peers}
        return (peers & self.workers.keys()) - {gradient.worker for gradient in there}

    def _members(self) -> set[int]:
        """Returns the workers that the current round waits for: they have not finished this call of `fit`."""
        return self.awaited | {number for number, worker in self.workers.items() if worker.round[0] <= self.round[0]}

    def _begin_fit(self) -> None:
        """Goes on to the next call of `fit` when all workers have finished the last one and its pushes are applied."""
        if self.workers and not self._members() and all(entry.round != self.round for entry in self.waiting):
            self.round = min(entry.round[0] for entry in self.workers.values()), 0


def _next(number: Round) -> Round:
    return number[0], number[1] + 1


def weights(gradients: list[Gradient]) -> list[float]:
    """Returns each gradient's factor in the average: its scale, times its share of all samples."""
    samples = sum(gradient.samples for gradient in gradients)
    if not samples:
        return [gradient.scale / len(gradients) for gradient in gradients]
    return [gradient.scale * gradient.samples / samples for gradient in gradients]
