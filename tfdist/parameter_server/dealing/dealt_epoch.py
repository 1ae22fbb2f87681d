"""An epoch whose batches a dealer deals: which are with workers, to be dealt again, or still to come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tfdist.parameter_server.dealing.plan import EpochKey, Plan


class DealerError(ValueError):
    """A request that the dealer refuses. The message says why."""


@dataclass(frozen=True)
class Batch:
    """A batch that is dealt to a worker.

    Attributes:
        ticket: number that no other dealt batch has.
        start: place of the first sample in the epoch's order.
        stop: place behind the last sample.
        content: the batch itself, as a stream has brought it; None without a stream.
    """

    ticket: int
    start: int
    stop: int
    content: Any = None


@dataclass(frozen=True)
class WaitForBatch:
    """Answer that there is no batch now.

    The remaining batches are with other workers, which may die, or are not brought yet, or this worker has its limit.
    """


@dataclass(frozen=True)
class EpochOver:
    """Answer that the epoch has no more batches: every sample is committed, or all workers have gone on."""


@dataclass
class DealtEpoch:
    """An epoch that is not over.

    Attributes:
        plan: plan of the epoch's first worker.
        dealt: how many batches have been dealt; the next new batch has this number.
        again: numbers of batches to deal again, oldest first.
        out: by ticket, the worker that has the batch, and the batch's number.
        members: workers that have begun the epoch and have not gone on; also lost workers, which may come back.
        brought: how many batches a stream has brought.
        content: by number, batches of a stream that are not committed.
        has_ended: whether a stream brings no more batches.
    """

    plan: Plan
    dealt: int = 0
    again: deque[int] = field(default_factory=deque)
    out: dict[int, tuple[int, int]] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    brought: int = 0
    content: dict[int, Any] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def there(self) -> int:
        """Number of batches that could be dealt so far, including those that were."""
        batches = self.plan.batches
        return self.brought if batches is None else batches

    @property
    def is_growing(self) -> bool:
        """Whether a stream may bring more batches, so that a worker may get one before others commit."""
        return self.is_stream and not self.has_ended

    @property
    def is_committed(self) -> bool:
        """Whether all batches are committed, and no more will come."""
        return not self.is_growing and self.dealt == self.there and not self.again and not self.out

    @property
    def is_stream(self) -> bool:
        """Whether a stream brings the batches, until it ends."""
        return self.plan.samples is None

    def batch(self, ticket: int) -> Batch:
        """Returns the batch of a ticket that is out."""
        number = self.out[ticket][1]
        start = number * self.plan.batch_size
        stop = start + self.plan.batch_size
        stop = stop if self.plan.samples is None else min(stop, self.plan.samples)
        return Batch(ticket, start, stop, self.content.get(number))

    def next(self) -> int | None:
        """Returns the number of the batch to deal now, and counts it as dealt; None if there is none."""
        if self.again:
            return self.again.popleft()
        if self.dealt == self.there:
            return None
        self.dealt += 1
        return self.dealt - 1

    def state(self, missing: Iterable[int]) -> dict[str, Any]:
        """Returns the state for a snapshot, as JSON values. Batches that workers have now count as not dealt.

        Args:
            missing: numbers of committed batches that count as not dealt, too.
        """
        return {
            "samples": self.plan.samples,
            "batch_size": self.plan.batch_size,
            "seed": self.plan.seed,
            "within_batches": self.plan.within_batches,
            "dealt": self.dealt,
            "again": [*self.again, *(number for _, number in self.out.values()), *missing],
            "members": sorted(self.members),
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> DealtEpoch:
        """Returns the epoch of a `state`."""
        plan = Plan(state["samples"], state["batch_size"], state["seed"], state["within_batches"])
        return cls(plan, state["dealt"], deque(state["again"]), members=set(state["members"]))


def check_equal(worker: int, epoch: EpochKey, plan: Plan, first: Plan) -> None:
    """Raises `DealerError` if a worker's plan differs from the first worker's in more than the seed."""
    for what, own, others in (
        ("samples", *("in a stream" if compared.samples is None else compared.samples for compared in (plan, first))),
        ("a batch size of", plan.batch_size, first.batch_size),
        ("shuffle", *(compared.seed is not None and _how(compared) for compared in (plan, first))),
    ):
        if own != others:
            raise DealerError(
                f"all workers must train on the same data: in {name_of(epoch)}, worker {worker} has {what} {own}, and "
                f"the worker that began it has {what} {others}. Load the same data on every worker, and give `fit` "
                "the same batch_size and shuffle."
            )


def _how(plan: Plan) -> bool | str:
    """Returns the ``shuffle`` of `fit` that a plan with a seed stands for."""
    return "batch" if plan.within_batches else True


def name_of(epoch: EpochKey) -> str:
    """Returns the name of an epoch in messages."""
    return f"epoch {epoch[1]} of fit {epoch[0]}"
