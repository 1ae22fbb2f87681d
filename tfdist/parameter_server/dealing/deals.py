"""Handles the workers' messages to a job's dealer, and parks requests that wait for a batch. It uses no sockets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.parameter_server.dealing.dealer import Dealer
from tfdist.parameter_server.dealing.dealt_epoch import Batch, DealerError, EpochOver
from tfdist.parameter_server.dealing.merging import Merging
from tfdist.parameter_server.dealing.plan import EpochKey
from tfdist.parameter_server.protocol.dealing import (
    BeginEpoch,
    BringBatch,
    DealerMessage,
    DealtBatch,
    EpochPlanned,
    LeaveEpoch,
    MergeMetrics,
    NoBatch,
    RoomForBatch,
    SkipBatch,
    TakeBatch,
)
from tfdist.parameter_server.protocol.messages import Done, Refused, Waiting
from tfdist.parameter_server.protocol.wire import Message

Answer = Callable[[Message, Sequence[np.ndarray]], None]
"""Sends an answer to the sender of a message."""


@dataclass
class _ParkedRequest:
    """A request that waits for a batch, or for room for a batch.

    Attributes:
        message: the worker's message.
        answer: function that sends the answer.
    """

    message: Any
    answer: Answer


class DealerService:
    """A job's dealer with the requests that wait for it, for one thread.

    A batch that a stream has brought is kept until it is committed. The worker with the stream may die and come back,
    and the others wait for it. If that worker ends its call of `fit`, the stream has ended for all.

    Args:
        dealer: dealer of the batches; None makes one.
        job: unique name of the job; `restore` ignores the state of another job.

    Attributes:
        merging: merger of the metrics of epochs.
        when_idle_changes: function that is called with the workers that have no batch and wait for one, when they
            change. Their clocks stand still until others have committed.
        when_left: function that is called with a worker that takes no more batches in this call of `fit`.
    """

    def __init__(self, dealer: Dealer | None = None, job: str = "") -> None:
        self._dealer = dealer or Dealer()
        self._job = job
        self._incarnations: dict[int, int] = {}
        self._parked: dict[int, _ParkedRequest] = {}
        self._brings: BeginEpoch | None = None
        self._bringing: _ParkedRequest | None = None
        self._streamless = -1
        self._failures: dict[EpochKey, str] = {}
        self.merging = Merging(self._dealer.workers)
        self._idle: frozenset[int] = frozenset()
        self.when_idle_changes: Callable[[frozenset[int]], None] = lambda idle: None
        self.when_left: Callable[[int], None] = lambda worker: None

    @property
    def idle(self) -> frozenset[int]:
        """Workers that have no batch and wait for one."""
        return self._idle

    def heard(self, message: DealerMessage, arrays: Sequence[np.ndarray], answer: Answer) -> None:
        """Handles a worker's message.

        Args:
            message: the message.
            arrays: the message's arrays.
            answer: function that sends the answer; may be called later.
        """
        if not isinstance(message, BeginEpoch) and self._incarnations.get(message.worker) != message.incarnation:
            if isinstance(
                message, (LeaveEpoch, SkipBatch)
            ):  # nothing is left to do: the dealer has forgotten the worker
                answer(Done(message.id, 0), ())
            else:
                why = f"worker {message.worker} has not begun this epoch, or was taken for lost"
                answer(Refused(message.id, why, is_unknown=True), ())
            return
        match message:
            case BeginEpoch():
                self._begin(message, answer)
            case TakeBatch():
                self._take(message, answer)
            case BringBatch():
                self._bring(message, arrays, answer)
            case SkipBatch():
                if self._dealer.may_commit(message.worker, message.ticket):
                    self._dealer.commit(message.worker, message.ticket)
                answer(Done(message.id, 0), ())
            case MergeMetrics():
                self.merging.heard(message, arrays, answer)
            case LeaveEpoch():
                self._end_parked(message.worker)
                self._end_stream(message.worker)
                self._dealer.leave(message.worker)
                del self._incarnations[message.worker]
                answer(Done(message.id, 0), ())
                self.when_left(message.worker)
        self._settle()

    def lost(self, worker: int) -> None:
        """Deals the batches of a lost worker again.

        Args:
            worker: task number of the worker; may be unknown.
        """
        self._incarnations.pop(worker, None)
        self._parked.pop(worker, None)  # a worker that lives asks again, and learns that it has to begin again
        self._dealer.lost(worker)
        self._settle()

    def state(self, waiting: Collection[tuple[int, int]]) -> dict[str, Any]:
        """Returns the state for a snapshot; see `Dealer.state`."""
        return {"job": self._job, "dealer": self._dealer.state(waiting)}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Goes on from a snapshot of the same job, before any message is handled.

        Args:
            state: result of `state`; None or that of another job changes nothing.
        """
        if state is not None and state["job"] == self._job:
            self._dealer.restore(state["dealer"])

    def restart(self, state: dict[str, Any], next_ticket: int | None = None) -> int:
        """Goes on from a state, of this dealer or another, in the middle of an epoch. All workers have to begin again.

        Args:
            state: result of `state`.
            next_ticket: ticket of the next batch; None keeps this dealer's.

        Returns:
            The ticket of the next batch.
        """
        self._incarnations.clear()
        self.restore(state)
        if next_ticket is not None:
            self._dealer.next_ticket = next_ticket
        self._settle()
        return self._dealer.next_ticket

    def is_committed(self, worker: int, ticket: int) -> bool:
        """Returns whether the worker has committed the batch; see `Dealer.is_committed`."""
        return self._dealer.is_committed(worker, ticket)

    def may_commit(self, worker: int, ticket: int) -> bool:
        """Returns whether the worker's push may be applied; see `Dealer.may_commit`."""
        return self._dealer.may_commit(worker, ticket)

    def commit(self, worker: int, ticket: int) -> None:
        """Counts a batch whose gradients are part of an update; see `Dealer.commit`."""
        self._dealer.commit(worker, ticket)
        self._settle()

    def give_back(self, worker: int, ticket: int) -> None:
        """Deals a batch again whose gradients were not used; see `Dealer.give_back`."""
        self._dealer.give_back(worker, ticket)
        self._settle()

    def _begin(self, message: BeginEpoch, answer: Answer) -> None:
        if self._incarnations.get(message.worker) != message.incarnation:
            self._end_parked(message.worker)
            self._dealer.take_back(message.worker)
        key = _epoch_of(message)
        try:
            plan = self._dealer.begin(
                message.worker, key, message.samples, message.batch_size, message.seed, message.within_batches
            )
        except DealerError as error:
            answer(Refused(message.id, str(error)), ())
            return
        self._incarnations[message.worker] = message.incarnation
        if message.brings:
            if self._brings is not None and key > _epoch_of(self._brings):
                self._dealer.end_stream(_epoch_of(self._brings))
                self._end_bringing()
            self._brings = message
        elif plan.samples is None and message.fit <= self._streamless:
            self._dealer.end_stream(key)
        answer(EpochPlanned(message.id, plan.seed), ())

    def _take(self, message: TakeBatch, answer: Answer) -> None:
        """Answers a request for a batch, now or later. A repeated request replaces its earlier copy."""
        parked = self._parked.get(message.worker)
        if parked is not None and parked.message.request > message.request:
            return  # a late copy
        self._parked[message.worker] = _ParkedRequest(message, answer)
        self._settle()
        if message.worker in self._parked:
            awaited = () if self._brings is None else (self._brings.worker,)
            answer(Waiting(message.id, awaited), ())

    def _bring(self, message: BringBatch, arrays: Sequence[np.ndarray], answer: Answer) -> None:
        key = _epoch_of(message)
        if message.failure is not None:
            self._failures[key] = message.failure
        if message.is_end:
            self._dealer.end_stream(key)
        else:
            self._dealer.bring(key, message.number, arrays)
        self._bringing = _ParkedRequest(message, answer)
        self._settle()
        if self._bringing is not None:
            answer(Waiting(message.id), ())

    def _end_stream(self, worker: int) -> None:
        """Ends the stream in this call of `fit`, if this worker brings it."""
        if self._brings is not None and self._brings.worker == worker:
            self._dealer.end_stream(_epoch_of(self._brings))
            self._end_bringing()
            self._streamless = self._brings.fit
            self._brings = None

    def _end_bringing(self) -> None:
        if self._bringing is not None:
            self._bringing.answer(RoomForBatch(self._bringing.message.id, None), ())
            self._bringing = None

    def _end_parked(self, worker: int) -> None:
        """Answers the parked request of a worker that has gone on to another epoch or has left."""
        parked = self._parked.pop(worker, None)
        if parked is not None:
            parked.answer(NoBatch(parked.message.id, is_over=True), ())

    def _settle(self) -> None:
        """Answers the requests that can be answered now."""
        for worker, parked in list(self._parked.items()):
            answer = self._answer_to(parked.message)
            if answer is not None:
                del self._parked[worker]
                parked.answer(*answer)
        if (bringing := self._bringing) is not None:
            key = _epoch_of(bringing.message)
            if self._dealer.has_room(key):
                self._bringing = None
                bringing.answer(RoomForBatch(bringing.message.id, self._dealer.wanted(key)), ())
        if (idle := self._dealer.idle) != self._idle:
            self._idle = idle
            self.when_idle_changes(idle)
        self.merging.settle()

    def _answer_to(self, message: TakeBatch) -> tuple[Message, Sequence[np.ndarray]] | None:
        key = _epoch_of(message)
        if key in self._failures:
            return Refused(message.id, self._failures[key]), ()
        try:
            dealt = self._dealer.take(message.worker, key, message.request)
        except DealerError as error:
            return Refused(message.id, str(error), is_unknown=True), ()
        if isinstance(dealt, Batch):
            return DealtBatch(message.id, dealt.ticket, dealt.start, dealt.stop), dealt.content or ()
        if isinstance(dealt, EpochOver):
            return NoBatch(message.id, is_over=True), ()
        if message.worker in self._dealer.idle and not message.is_idle:
            return NoBatch(message.id, is_over=False), ()
        return None


def _epoch_of(message: BeginEpoch | BringBatch | TakeBatch) -> EpochKey:
    return message.fit, message.epoch
