"""Which worker trains on which batch: the batches of an epoch are dealt to any number of workers.

One server has the dealer of a model. A worker takes a batch with a *ticket*, and the ticket travels with the push of
the batch's gradients to that server. The push commits the batch, in one step with the update:

1. `Dealer.is_committed`: the push has been applied already and its answer was lost. It is only acknowledged.
2. not `Dealer.may_commit`: the batch was dealt to somebody else. The push is refused before it is applied; the worker
   drops these gradients and takes the next batch.
3. else the push is applied, and `Dealer.commit` counts the batch. If the push is dropped as too late,
   `Dealer.give_back` deals the batch again.

A worker pushes to the dealer's server first, and to the others when that one has acknowledged: else they would apply
gradients that it refuses.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tfdist.parameter_server.dealing.plan import EpochKey, Plan

_REMEMBERED = 8
"""Committed batches of each worker whose numbers are known, for those whose gradients wait for others."""


class DealerError(ValueError):
    """The dealer refuses a request. The message says why."""


@dataclass(frozen=True)
class Batch:
    """A batch that is dealt.

    Attributes:
        ticket: its number; no other batch ever has the same.
        start: place of its first sample in the epoch's order.
        stop: place behind its last one.
        content: what a stream has brought; None without one.
    """

    ticket: int
    start: int
    stop: int
    content: Any = None


@dataclass(frozen=True)
class Wait:
    """No batch now. All that are left are with other workers, which may die, or this worker has as many as it may."""


@dataclass(frozen=True)
class Over:
    """The epoch has no more batches: every sample is committed, or all workers have gone on."""


@dataclass
class _Epoch:
    """An epoch that is not over.

    Attributes:
        plan: of its first worker.
        dealt: how many batches have been dealt; the next new one has this number.
        again: numbers of batches to deal again, oldest first.
        out: by ticket, the worker that has a batch, and the batch's number.
        members: workers that have begun it and have not gone on; also lost ones, which may come back.
        brought: how many batches a stream has brought.
        content: by number, what a stream has brought of batches that are not committed.
        has_ended: whether there will be no more batches.
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
        """How many batches can be dealt so far, with those that have been."""
        batches = self.plan.batches
        return self.brought if batches is None else batches

    @property
    def is_growing(self) -> bool:
        """Whether more batches may come: those that wait for one get it without others' commits."""
        return self.is_stream and not self.has_ended

    @property
    def is_committed(self) -> bool:
        return not self.is_growing and self.dealt == self.there and not self.again and not self.out

    @property
    def is_stream(self) -> bool:
        return self.plan.samples is None

    def batch(self, ticket: int) -> Batch:
        number = self.out[ticket][1]
        start = number * self.plan.batch_size
        stop = start + self.plan.batch_size
        stop = stop if self.plan.samples is None else min(stop, self.plan.samples)
        return Batch(ticket, start, stop, self.content.get(number))

    def next(self) -> int | None:
        """The number of the batch to deal now; None if there is none."""
        if self.again:
            return self.again.popleft()
        if self.dealt == self.there:
            return None
        self.dealt += 1
        return self.dealt - 1


@dataclass
class _Worker:
    """A live worker.

    Attributes:
        epoch: that it takes part in.
        request: the number of its last request that got a batch; -1 before the first.
        ticket: of that batch.
        held: tickets that it has not committed, oldest first.
        is_idle: whether it has no batch and waits for one, or for the next epoch.
    """

    epoch: EpochKey
    request: int = -1
    ticket: int = -1
    held: list[int] = field(default_factory=list)
    is_idle: bool = False


class Dealer:
    """Deals the batches of epochs, so that each is committed once.

    An epoch is over when all of its batches are committed, or when every worker that took part in it has gone on to a
    later one. An epoch that nobody has begun is over when a later one has been begun: a worker that starts again
    passes all epochs that it has missed.

    It has no locks: one thread uses it.

    Args:
        limit: how many batches a worker may have that are not committed; 2 is one to train on and one to prepare.

    Attributes:
        next_ticket: of the next batch. A server that starts again deals other tickets than before it ended.
    """

    def __init__(self, limit: int = 2) -> None:
        if limit < 1:
            raise ValueError(f"Dealer(limit=…) must be at least 1; got {limit!r}")
        self._limit = limit
        self._epochs: dict[EpochKey, _Epoch] = {}
        self._newest: EpochKey | None = None
        self._workers: dict[int, _Worker] = {}
        self._committed: dict[int, deque[int]] = {}
        self._numbers: dict[int, tuple[EpochKey, int]] = {}
        self.next_ticket = secrets.randbits(60)

    def begin(
        self, worker: int, epoch: EpochKey, samples: int | None, batch_size: int, shuffle_seed: int | None
    ) -> Plan:
        """A worker takes part in an epoch from now on, and in no other. It may begin the same one again.

        The first worker's plan counts. Others must have the same numbers; they get its seed.

        Args:
            worker: its task's number.
            epoch: that it begins. Batches that it has of another one are dealt again.
            samples: in the epoch; see `Plan`.
            batch_size: samples in a batch.
            shuffle_seed: the worker's proposal, of at most 64 bits; None if it does not shuffle.

        Returns:
            The epoch's plan.

        Raises:
            DealerError: the numbers are none, or not those of the epoch's other workers.
        """
        if (samples is not None and samples < 1) or batch_size < 1:
            raise DealerError(f"an epoch needs samples, and batches of at least one; got {samples=}, {batch_size=}")
        plan = Plan(samples, batch_size, shuffle_seed)
        if epoch not in self._epochs and not self._is_past(epoch):
            self._epochs[epoch] = _Epoch(plan)
            self._newest = epoch if self._newest is None else max(self._newest, epoch)
        current = self._epochs.get(epoch)
        if current is not None:
            _check_equal(worker, epoch, plan, current.plan)
            plan = current.plan
            current.members.add(worker)
        known = self._workers.get(worker)
        if known is None or known.epoch != epoch:
            self.lost(worker)
            self._workers[worker] = _Worker(epoch)
        for earlier in [key for key in self._epochs if key < epoch]:
            self._go_on(worker, earlier)
        return plan

    def take(self, worker: int, epoch: EpochKey, request: int | None = None) -> Batch | Wait | Over:
        """Deals a batch to a worker.

        After `Wait`, the answer may be another one when somebody has committed, given back or been lost.

        Args:
            worker: that has begun the epoch.
            epoch: of the batch.
            request: a number that rises with each of the worker's requests. The same one again gets the same batch; a
                lower one is a late copy, and gets nothing. None for a request that comes only once.

        Raises:
            DealerError: the worker has not begun the epoch.
        """
        one, current = self._workers.get(worker), self._epochs.get(epoch)
        if current is None and self._is_past(epoch):
            if one is not None:
                one.is_idle = True  # the last batches of others are not to wait for its first one of the next epoch
            return Over()
        if current is None or one is None or one.epoch != epoch:
            raise DealerError(f"worker {worker} has to begin {_name(epoch)} before it takes batches of it")
        if request is not None and request <= one.request:
            is_open = request == one.request and one.ticket in current.out
            return current.batch(one.ticket) if is_open else Wait()
        number = current.next() if len(one.held) < self._limit else None
        one.is_idle = number is None and not one.held and not current.is_growing
        if number is None:
            return Wait()
        ticket = self.next_ticket
        self.next_ticket += 1
        current.out[ticket] = worker, number
        one.held.append(ticket)
        one.ticket = ticket
        if request is not None:
            one.request = request
        return current.batch(ticket)

    def bring(self, epoch: EpochKey, number: int, content: Any) -> None:
        """A stream has brought a batch. One that is there already is dropped.

        Args:
            epoch: of the batch; may be over.
            number: of the batch in the epoch.
            content: of the batch.
        """
        current = self._epochs.get(epoch)
        if current is not None and number == current.brought and not current.has_ended:
            current.content[number] = content
            current.brought += 1

    def end_stream(self, epoch: EpochKey) -> None:
        """A stream brings no more batches.

        Args:
            epoch: may be over, or have no stream.
        """
        current = self._epochs.get(epoch)
        if current is not None and current.is_stream:
            current.has_ended = True
            if current.is_committed:
                del self._epochs[epoch]

    def wanted(self, epoch: EpochKey) -> int | None:
        """The number of the batch that a stream has to bring next.

        Args:
            epoch: that some worker has begun.

        Returns:
            None if the epoch is over, or the stream has ended.
        """
        current = self._epochs.get(epoch)
        return None if current is None or current.has_ended else current.brought

    def has_room(self, epoch: EpochKey) -> bool:
        """Whether a stream is to bring more: not more than a batch for each worker waits to be dealt, and one.

        Args:
            epoch: may be over.
        """
        current = self._epochs.get(epoch)
        if current is None:
            return True
        return len(current.again) + current.brought - current.dealt <= len(self.workers(epoch))

    def may_commit(self, worker: int, ticket: int) -> bool:
        """Whether a worker's push with this ticket may be applied: the worker has the batch, and it is not committed.

        Args:
            worker: that pushes.
            ticket: of the batch that the gradients are of.
        """
        one = self._workers.get(worker)
        return one is not None and ticket in one.held

    def is_committed(self, worker: int, ticket: int) -> bool:
        """Whether a ticket is among the last ones that a worker has committed, as many as it may have at once.

        Args:
            worker: that pushes, perhaps again.
            ticket: of the batch that the gradients are of.
        """
        return ticket in self._committed.get(worker, ())

    def commit(self, worker: int, ticket: int) -> None:
        """A batch is part of an update. It may be committed twice, as `is_committed` tells.

        Args:
            worker: that has pushed.
            ticket: of the batch.

        Raises:
            DealerError: the batch is not the worker's any more. What it has pushed must not be applied.
        """
        if self.is_committed(worker, ticket):
            return
        if not self.may_commit(worker, ticket):
            raise DealerError(self.why_not(worker, ticket))
        one = self._workers[worker]
        one.held.remove(ticket)
        self._committed.setdefault(worker, deque(maxlen=self._limit)).append(ticket)
        current = self._epochs[one.epoch]
        self._numbers[ticket] = one.epoch, current.out.pop(ticket)[1]
        current.content.pop(self._numbers[ticket][1], None)
        for old in list(self._numbers)[: -_REMEMBERED * max(1, len(self._workers))]:
            del self._numbers[old]
        if current.is_committed:
            del self._epochs[one.epoch]

    def why_not(self, worker: int, ticket: int) -> str:
        """Tells a worker why its push was refused.

        Args:
            worker: that has pushed.
            ticket: of the batch.
        """
        return (
            f"worker {worker} does not have the batch of ticket {ticket} any more: it was taken for lost or has begun "
            "another epoch, and the batch was dealt again. These gradients are dropped."
        )

    def give_back(self, worker: int, ticket: int) -> None:
        """A batch is dealt again, as its gradients were not used. Nothing happens if it is not the worker's.

        Args:
            worker: that has the batch.
            ticket: of the batch.
        """
        if self.may_commit(worker, ticket):
            one = self._workers[worker]
            one.held.remove(ticket)
            current = self._epochs[one.epoch]
            current.again.append(current.out.pop(ticket)[1])

    def lost(self, worker: int) -> None:
        """A worker has died, or is taken for dead: its batches are dealt again. It may come back and begin again.

        Args:
            worker: its task's number; may be unknown.
        """
        one = self._workers.get(worker)
        if one is not None:
            for ticket in list(one.held):
                self.give_back(worker, ticket)
            del self._workers[worker]

    def leave(self, worker: int) -> None:
        """A worker ends its part in its epoch, as when its fit stops: its batches are dealt again.

        Args:
            worker: its task's number; may be unknown.
        """
        one = self._workers.get(worker)
        self.lost(worker)
        if one is not None and one.epoch in self._epochs:
            self._go_on(worker, one.epoch)

    @property
    def idle(self) -> frozenset[int]:
        """Workers without a batch whose last request was answered by `Wait` or `Over`.

        No worker may wait for their clocks: they push nothing before others commit, or before the next epoch.
        """
        return frozenset(worker for worker, one in self._workers.items() if one.is_idle)

    def workers(self, epoch: EpochKey) -> frozenset[int]:
        """The live workers that have begun an epoch and none since.

        Args:
            epoch: that may be over.
        """
        return frozenset(worker for worker, one in self._workers.items() if one.epoch == epoch)

    def state(self, waiting: Collection[tuple[int, int]] = ()) -> dict[str, Any]:
        """What a snapshot holds, of values that JSON has. Batches that are out count as not dealt.

        It lacks epochs of streams, whose batches are nowhere else: they are not past, and may be begun again.

        Args:
            waiting: workers and tickets of batches that are committed, but whose gradients the snapshot lacks, as they
                wait for those of others; they count as not dealt, too.
        """
        missing = {ticket: self._numbers[ticket] for _, ticket in waiting if ticket in self._numbers}
        epochs = [
            {
                "epoch": list(key),
                "samples": epoch.plan.samples,
                "batch_size": epoch.plan.batch_size,
                "seed": epoch.plan.seed,
                "dealt": epoch.dealt,
                "again": [
                    *epoch.again,
                    *(number for _, number in epoch.out.values()),
                    *(number for of, number in missing.values() if of == key),
                ],
                "members": sorted(epoch.members),
            }
            for key, epoch in self._epochs.items()
            if not epoch.is_stream
        ]
        before = [(key[0], key[1] - 1) for key, epoch in self._epochs.items() if epoch.is_stream]
        newest = min([self._newest, *before]) if self._newest is not None else None
        return {
            "epochs": epochs,
            "newest": None if newest is None else list(newest),
            "committed": [
                [worker, [ticket for ticket in tickets if ticket not in missing]]
                for worker, tickets in self._committed.items()
            ],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Goes back to a snapshot, of this dealer or another. Workers have to begin again, and old tickets are void.

        Args:
            state: as `state` returns it.
        """
        self._workers = {}
        self._epochs = {
            (one["epoch"][0], one["epoch"][1]): _Epoch(
                Plan(one["samples"], one["batch_size"], one["seed"]),
                one["dealt"],
                deque(one["again"]),
                members=set(one["members"]),
            )
            for one in state["epochs"]
        }
        self._newest = None if state["newest"] is None else (state["newest"][0], state["newest"][1])
        self._committed = {worker: deque(tickets, self._limit) for worker, tickets in state["committed"]}

    def _go_on(self, worker: int, epoch: EpochKey) -> None:
        """A worker comes back to an epoch no more. The last one ends it."""
        members = self._epochs[epoch].members
        members.discard(worker)
        if not members:
            del self._epochs[epoch]

    def _is_past(self, epoch: EpochKey) -> bool:
        """Whether an epoch that is not in the books is over, not new."""
        return self._newest is not None and epoch <= self._newest


def _check_equal(worker: int, epoch: EpochKey, plan: Plan, first: Plan) -> None:
    """Raises `DealerError` where a worker's plan differs from the first worker's in more than the seed."""
    for what, own, others in (
        ("samples", *("in a stream" if one.samples is None else one.samples for one in (plan, first))),
        ("a batch size of", plan.batch_size, first.batch_size),
        ("shuffle", plan.seed is not None, first.seed is not None),
    ):
        if own != others:
            raise DealerError(
                f"all workers must train on the same data: in {_name(epoch)}, worker {worker} has {what} {own}, and "
                f"the worker that began it has {what} {others}. Load the same data on every worker, and give `fit` "
                "the same batch_size and shuffle."
            )


def _name(epoch: EpochKey) -> str:
    return f"epoch {epoch[1]} of fit {epoch[0]}"
