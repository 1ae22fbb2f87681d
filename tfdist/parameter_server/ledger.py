"""Which pushes a shard has counted: clocks, versions, duplicates, and who has to wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from tfdist.parameter_server.staleness import StalenessPolicy
from tfdist.parameter_server.synchronization import Synchronization


@dataclass
class Worker:
    """A live worker, as its shard knows it.

    Attributes:
        clock: the number of steps that it has pushed.
        sequence: of its last push that was counted; pushes with this number or a lower one are duplicates.
        is_active: whether others wait for it. A worker that evaluates, saves or traces is not waited for.
    """

    clock: int
    sequence: int = -1
    is_active: bool = False


@dataclass(frozen=True)
class Gradient:
    """A push that waits to be averaged.

    Attributes:
        worker: who pushed it.
        sequence: of the push.
        clock: of its step.
        samples: its weight in the average.
        staleness: updates between its read and its push.
        scale: by the staleness policy.
    """

    worker: int
    sequence: int
    clock: int
    samples: float
    staleness: int
    scale: float


@dataclass
class Ledger:
    """The bookkeeping of one shard, without its values.

    Attributes:
        synchronization: when updates are applied.
        policy: what late gradients are worth.
        version: the number of updates that were applied.
        awaited: workers that the job names and that have not entered yet; rounds wait for them.
        workers: the live ones, by number.
        waiting: gradients that are not applied yet, in the order in which they came.
        round: the clock whose gradients are averaged, where there are rounds.
        counted: by worker, its pushes that were counted, also of those that have left.
        dropped: by worker, its pushes that were dropped.
        staleness: how many pushes had which staleness.
    """

    synchronization: Synchronization
    policy: StalenessPolicy
    version: int = 0
    awaited: set[int] = field(default_factory=set)
    workers: dict[int, Worker] = field(default_factory=dict)
    waiting: list[Gradient] = field(default_factory=list)
    round: int = 0
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
        self.workers[worker] = Worker(self._present(), sequence)
        if any(one.worker == worker and one.clock == self.round for one in self.waiting):
            self.workers[worker].clock += self.synchronization.in_rounds  # it has a part in this round already
        return self.workers[worker].clock

    def leave(self, worker: int) -> None:
        """Nobody waits for a worker any more. What it has pushed counts."""
        self.awaited.discard(worker)
        self.workers.pop(worker, None)

    def suspend(self, worker: int) -> None:
        """Nobody waits for a worker until it pushes again, or says that it goes on. In rounds everybody does."""
        if not self.synchronization.in_rounds:
            self.workers[worker].is_active = False

    def resume(self, worker: int) -> int:
        """A worker goes on; if all others are further by now, with the clock of the slowest one.

        Returns:
            Its clock.
        """
        one = self.workers[worker]
        if not one.is_active:
            one.clock = max(one.clock, self._present())
            one.is_active = True
        return one.clock

    def _present(self) -> int:
        """The clock of a worker that begins now."""
        return self.round if self.synchronization.in_rounds else self.slowest()

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
        if self.synchronization.in_rounds:  # one that is late goes on with the round of the others
            one.sequence, one.clock = sequence, max(one.clock, clock + 1, self.round)
        else:
            one.sequence, one.clock = sequence, max(clock, self.resume(worker)) + 1
        staleness = max(0, self.version - read)
        scale = self.policy.scale(staleness)
        is_late = self.synchronization.in_rounds and clock < self.round
        if scale is None or is_late:
            self.dropped[worker] += 1
            return None
        self.counted[worker] += 1
        self.staleness[staleness] += 1
        gradient = Gradient(worker, sequence, clock, samples, staleness, scale)
        self.waiting.append(gradient)
        return gradient

    def due(self) -> list[Gradient]:
        """The gradients that make the next update; empty while some are missing. Taken out of those that wait."""
        if self.synchronization.in_rounds:
            ready = [gradient for gradient in self.waiting if gradient.clock == self.round]
            later = [gradient for gradient in self.waiting if gradient.clock != self.round]
            members = {*self.workers, *self.awaited}
            missing = members - {gradient.worker for gradient in ready}
            is_due = bool(ready) and len(missing) <= len(members) - self.synchronization.quorum(max(1, len(members)))
        else:
            quorum = self.synchronization.quorum(max(1, len(self.workers)))
            ready, later = self.waiting[:quorum], self.waiting[quorum:]
            is_due = len(ready) >= quorum
        if not is_due:
            return []
        self.waiting = later
        self.version += 1
        if self.synchronization.in_rounds:
            self.round += 1
        return ready

    def may_read(self, clock: int) -> bool:
        """Whether a worker at a clock may have the parameters now."""
        lead = self.synchronization.lead()
        if lead is None:
            return True
        if self.synchronization.in_rounds:
            return self.round >= clock
        return self.slowest() >= clock - lead


def weights(gradients: list[Gradient]) -> list[float]:
    """The factor of each gradient in the average: its scale, and its samples among those of all."""
    samples = sum(gradient.samples for gradient in gradients)
    if not samples:
        return [gradient.scale / len(gradients) for gradient in gradients]
    return [gradient.scale * gradient.samples / samples for gradient in gradients]
