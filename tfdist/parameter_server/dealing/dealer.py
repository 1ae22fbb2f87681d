"""Decides which worker trains on which batch: deals the batches of an epoch to any number of workers.

One server has the dealer of a job. A worker takes a batch with a *ticket*, and sends the ticket with the push of the
batch's gradients to that server. The push commits the batch together with the update:

1. `Dealer.is_committed`: the push has been applied already and its answer was lost. It is only acknowledged.
2. not `Dealer.may_commit`: the batch was dealt to another worker. The push is refused before it is applied; the worker
   drops these gradients and takes the next batch.
3. else the push is applied, and `Dealer.commit` counts the batch. If the push is dropped as too late,
   `Dealer.give_back` deals the batch again.

A worker pushes to the dealer's server first, and to the others after its acknowledgement. Otherwise they would apply
gradients that the dealer's server refuses.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from tfdist.parameter_server.dealing.dealt_epoch import (
    Batch,
    DealerError,
    DealtEpoch,
    EpochOver,
    WaitForBatch,
    check_equal,
    name_of,
)
from tfdist.parameter_server.dealing.plan import EpochKey, Plan

_CHIEF = 0
"""Number of the worker whose first values others may wait for."""
_REMEMBERED = 8
"""Committed batches per worker whose numbers are kept, as their gradients may wait for those of other workers."""


@dataclass
class _Worker:
    """A live worker.

    Attributes:
        epoch: epoch that the worker takes part in.
        request: the number of its last request that got a batch; -1 before the first.
        ticket: ticket of the batch of that request.
        held: tickets that the worker has not committed, oldest first.
        is_idle: whether the worker has no batch and waits for one, or for the next epoch.
    """

    epoch: EpochKey
    request: int = -1
    ticket: int = -1
    held: list[int] = field(default_factory=list)
    is_idle: bool = False


class Dealer:
    """A dealer of the batches of epochs, so that each batch is committed once.

    An epoch is over when all of its batches are committed, or when every worker that took part in it has gone on to a
    later epoch. An epoch that nobody has begun is over when a later one has been begun: a worker that starts again
    skips all epochs that it has missed.

    Until some batch is committed, the last one that is there is kept for the chief: others may need the values that it
    gives in its first step, and have all batches before it asks for one.

    It has no locks: one thread uses it.

    Args:
        limit: most uncommitted batches of a worker; 2 allows one to train on and one to prepare.

    Attributes:
        next_ticket: ticket of the next batch. It starts at random, so that a restarted server deals new tickets.
    """

    def __init__(self, limit: int = 2) -> None:
        if limit < 1:
            raise ValueError(f"Dealer(limit=…) must be at least 1; got {limit!r}")
        self._limit = limit
        self._epochs: dict[EpochKey, DealtEpoch] = {}
        self._newest: EpochKey | None = None
        self._workers: dict[int, _Worker] = {}
        self._committed: dict[int, deque[int]] = {}
        self._numbers: dict[int, tuple[EpochKey, int]] = {}
        self._keeps_for_chief = True
        self.next_ticket = secrets.randbits(60)

    def begin(
        self,
        worker: int,
        epoch: EpochKey,
        samples: int | None,
        batch_size: int,
        shuffle_seed: int | None,
        within_batches: bool = False,
    ) -> Plan:
        """Lets a worker take part in an epoch, and in no other. It may begin the same epoch again.

        The first worker's plan counts. Other workers must have the same numbers, and get the first worker's seed.

        Args:
            worker: task number of the worker.
            epoch: epoch that it begins. Its batches of other epochs are dealt again.
            samples: number of samples in the epoch; see `Plan`.
            batch_size: number of samples in a batch.
            shuffle_seed: seed that the worker proposes, of at most 64 bits; None if it does not shuffle.
            within_batches: whether it shuffles within each batch only.

        Returns:
            The epoch's plan.

        Raises:
            DealerError: the numbers are less than 1, or differ from those of the epoch's other workers.
        """
        if (samples is not None and samples < 1) or batch_size < 1:
            raise DealerError(
                f"an epoch needs at least one sample, and a batch size of at least 1; got {samples=}, {batch_size=}"
            )
        plan = Plan(samples, batch_size, shuffle_seed, within_batches)
        if epoch not in self._epochs and not self._is_past(epoch):
            self._epochs[epoch] = DealtEpoch(plan)
            self._newest = epoch if self._newest is None else max(self._newest, epoch)
        current = self._epochs.get(epoch)
        if current is not None:
            check_equal(worker, epoch, plan, current.plan)
            plan = current.plan
            current.members.add(worker)
        known = self._workers.get(worker)
        if known is None or known.epoch != epoch:
            self.take_back(worker)
            self._workers[worker] = _Worker(epoch)
        for earlier in [key for key in self._epochs if key < epoch]:
            self._go_on(worker, earlier)
        return plan

    def take(self, worker: int, epoch: EpochKey, request: int | None = None) -> Batch | WaitForBatch | EpochOver:
        """Deals a batch to a worker.

        After `WaitForBatch`, ask again when a worker has committed, given back or been lost, or when a stream has
        brought more.

        Args:
            worker: number of a worker that has begun the epoch.
            epoch: epoch of the batch.
            request: number that rises with each of the worker's requests. A repeated number gets the same batch. A
                lower number is a late copy, and gets nothing. None for a request that comes only once.

        Raises:
            DealerError: the worker has not begun the epoch.
        """
        state, current = self._workers.get(worker), self._epochs.get(epoch)
        if current is None and self._is_past(epoch):
            if state is not None:
                state.is_idle = True  # others' last batches must not wait for this worker's first one of the next epoch
            return EpochOver()
        if current is None or state is None or state.epoch != epoch:
            raise DealerError(f"worker {worker} has to begin {name_of(epoch)} before it takes batches of it")
        if request is not None and request <= state.request:
            is_open = request == state.request and state.ticket in current.out
            return current.batch(state.ticket) if is_open else WaitForBatch()
        if worker == _CHIEF:
            self._keeps_for_chief = False
        number = current.next() if len(state.held) < self._limit and not self._is_kept(current) else None
        state.is_idle = number is None and not state.held and not current.is_growing
        if number is None:
            return WaitForBatch()
        ticket = self.next_ticket
        self.next_ticket += 1
        current.out[ticket] = worker, number
        state.held.append(ticket)
        state.ticket = ticket
        if request is not None:
            state.request = request
        return current.batch(ticket)

    def bring(self, epoch: EpochKey, number: int, content: Any) -> None:
        """Takes a batch of a stream. A batch that is there already, or is not the next one, is dropped.

        Args:
            epoch: epoch of the batch; may be over.
            number: number of the batch in the epoch.
            content: the batch itself.
        """
        current = self._epochs.get(epoch)
        if current is not None and number == current.brought and not current.has_ended:
            current.content[number] = content
            current.brought += 1

    def end_stream(self, epoch: EpochKey) -> None:
        """Ends a stream, which brings no more batches.

        Args:
            epoch: epoch of the stream; may be over, or have no stream.
        """
        current = self._epochs.get(epoch)
        if current is not None and current.is_stream:
            current.has_ended = True
            if current.is_committed:
                del self._epochs[epoch]

    def wanted(self, epoch: EpochKey) -> int | None:
        """Returns the number of the batch that a stream has to bring next.

        Args:
            epoch: epoch that some worker has begun.

        Returns:
            The number; None if the epoch is over, or the stream has ended.
        """
        current = self._epochs.get(epoch)
        return None if current is None or current.has_ended else current.brought

    def has_room(self, epoch: EpochKey) -> bool:
        """Returns whether a stream may go on: at most one batch per worker waits to be dealt, or the epoch is over.

        Args:
            epoch: epoch of the stream; may be over.
        """
        current = self._epochs.get(epoch)
        if current is None:
            return True
        return len(current.again) + current.brought - current.dealt <= len(self.workers(epoch))

    def may_commit(self, worker: int, ticket: int) -> bool:
        """Returns whether a worker's push with this ticket may be applied: the worker has the batch uncommitted.

        Args:
            worker: number of the worker that pushes.
            ticket: ticket of the batch that the gradients were computed on.
        """
        state = self._workers.get(worker)
        return state is not None and ticket in state.held

    def is_committed(self, worker: int, ticket: int) -> bool:
        """Returns whether a ticket is among the worker's last committed ones, of which ``limit`` are remembered.

        Args:
            worker: number of the worker that pushes, perhaps again.
            ticket: ticket of the batch that the gradients were computed on.
        """
        return ticket in self._committed.get(worker, ())

    def commit(self, worker: int, ticket: int) -> None:
        """Counts a batch whose gradients are part of an update. Nothing happens if it is committed already.

        Args:
            worker: number of the worker that has pushed.
            ticket: ticket of the batch.

        Raises:
            DealerError: the batch is not the worker's any more. The push must not be applied.
        """
        if self.is_committed(worker, ticket):
            return
        if not self.may_commit(worker, ticket):
            raise DealerError(self.why_not(worker, ticket))
        self._keeps_for_chief = False
        state = self._workers[worker]
        state.held.remove(ticket)
        self._committed.setdefault(worker, deque(maxlen=self._limit)).append(ticket)
        current = self._epochs[state.epoch]
        self._numbers[ticket] = state.epoch, current.out.pop(ticket)[1]
        current.content.pop(self._numbers[ticket][1], None)
        for old in list(self._numbers)[: -_REMEMBERED * max(1, len(self._workers))]:
            del self._numbers[old]
        if current.is_committed:
            del self._epochs[state.epoch]

    def why_not(self, worker: int, ticket: int) -> str:
        """Returns the text that tells why a push was refused.

        Args:
            worker: number of the worker that has pushed.
            ticket: ticket of the batch.
        """
        return (
            f"worker {worker} no longer has the batch of ticket {ticket}: the worker was taken for lost or has begun "
            "another epoch, and the batch was dealt again. These gradients are dropped."
        )

    def give_back(self, worker: int, ticket: int) -> None:
        """Deals a batch again whose gradients were not used. Nothing happens if the batch is not the worker's.

        Args:
            worker: number of the worker that has the batch.
            ticket: ticket of the batch.
        """
        if self.may_commit(worker, ticket):
            state = self._workers[worker]
            state.held.remove(ticket)
            current = self._epochs[state.epoch]
            current.again.append(current.out.pop(ticket)[1])

    def lost(self, worker: int) -> None:
        """Deals the batches of a lost worker again. The worker may come back and begin again.

        Args:
            worker: task number of the worker; may be unknown.
        """
        self._keeps_for_chief = self._keeps_for_chief and worker != _CHIEF
        self.take_back(worker)

    def take_back(self, worker: int) -> None:
        """Deals the batches of a worker again that begins anew.

        Args:
            worker: task number of the worker; may be unknown.
        """
        state = self._workers.get(worker)
        if state is not None:
            for ticket in list(state.held):
                self.give_back(worker, ticket)
            del self._workers[worker]

    def leave(self, worker: int) -> None:
        """Ends a worker's part in its epoch, as when its `fit` stops, and deals its batches again.

        Args:
            worker: task number of the worker; may be unknown.
        """
        state = self._workers.get(worker)
        self.lost(worker)
        if state is not None and state.epoch in self._epochs:
            self._go_on(worker, state.epoch)

    @property
    def idle(self) -> frozenset[int]:
        """Workers without a batch whose last request was answered by `WaitForBatch` or `EpochOver`.

        No worker may wait for an idle worker's clock: an idle worker pushes nothing before others commit, or before
        the next epoch.
        """
        return frozenset(worker for worker, state in self._workers.items() if state.is_idle)

    def workers(self, epoch: EpochKey) -> frozenset[int]:
        """Returns the live workers that have begun an epoch, and none since.

        Args:
            epoch: key of the epoch, which may be over.
        """
        return frozenset(worker for worker, state in self._workers.items() if state.epoch == epoch)

    def state(self, waiting: Collection[tuple[int, int]] = ()) -> dict[str, Any]:
        """Returns the state for a snapshot, as JSON values. Batches that workers have now count as not dealt.

        The state lacks epochs of streams, as their batches exist only here. Such epochs may be begun again.

        Args:
            waiting: worker and ticket of each committed batch whose gradients the snapshot lacks, as they wait for
                those of other workers. These batches count as not dealt, too.
        """
        missing = {ticket: self._numbers[ticket] for _, ticket in waiting if ticket in self._numbers}
        epochs = [
            {
                "epoch": list(key),
                **epoch.state(number for epoch_key, number in missing.values() if epoch_key == key),
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
            state: result of `state`.
        """
        self._keeps_for_chief = False
        self._workers = {}
        self._epochs = {(epoch["epoch"][0], epoch["epoch"][1]): DealtEpoch.restored(epoch) for epoch in state["epochs"]}
        self._newest = None if state["newest"] is None else (state["newest"][0], state["newest"][1])
        self._committed = {worker: deque(tickets, self._limit) for worker, tickets in state["committed"]}

    def _is_kept(self, current: DealtEpoch) -> bool:
        """Returns whether the next batch is kept for the chief."""
        return self._keeps_for_chief and len(current.again) + current.there - current.dealt == 1

    def _go_on(self, worker: int, epoch: EpochKey) -> None:
        """Removes a worker from an epoch that it does not come back to. The last worker's removal ends the epoch."""
        members = self._epochs[epoch].members
        members.discard(worker)
        if not members:
            del self._epochs[epoch]

    def _is_past(self, epoch: EpochKey) -> bool:
        """Returns whether an epoch that the dealer does not have is over, as opposed to new."""
        return self._newest is not None and epoch <= self._newest
