"""A server's part of the model: what each message does to it, and what is answered. It knows no sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.parameter_server.gradients import Gradients, weighted_sum
from tfdist.parameter_server.ledger import Ledger, weights
from tfdist.parameter_server.messages import (
    Attach,
    Attached,
    Create,
    Done,
    Leave,
    Pull,
    Push,
    Refused,
    Suspend,
    Values,
    Waiting,
)
from tfdist.parameter_server.state import State
from tfdist.parameter_server.store import Store
from tfdist.parameter_server.wire import Message

Answer = Callable[[Message, Sequence[np.ndarray]], None]
"""Sends an answer to where a message came from."""


@dataclass(frozen=True)
class _Parked:
    """A message whose answer has to wait.

    Attributes:
        message: from a worker.
        answer: to its sender.
    """

    message: Pull | Push
    answer: Answer


@dataclass
class Shard:
    """A shard, in one thread.

    Attributes:
        ledger: which pushes have counted.
        store: its values; None until the chief has given them.
        digest: of the model; None until then.
    """

    ledger: Ledger
    store: Store | None = None
    digest: str | None = None
    _incarnations: dict[int, int] = field(default_factory=dict)
    _sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    _gradients: dict[int, Gradients] = field(default_factory=dict)
    _parked: list[_Parked] = field(default_factory=list)

    def heard(self, message: Message, arrays: list[np.ndarray], answer: Answer) -> None:
        """Does what a message says.

        Args:
            message: from a worker.
            arrays: that came with it; read-only views, which stay as they are.
            answer: to its sender; may be used later.
        """
        match message:
            case Attach():
                self._attach(message, answer)
            case Create():
                self._create(message, arrays, answer)
            case Push() | Pull() | Suspend() | Leave() if self._incarnations.get(message.worker) != message.incarnation:
                why = f"worker {message.worker} has not attached, or was taken for lost"
                answer(Refused(message.id, why, is_unknown=True), ())
            case Push() if self.store is None:
                answer(Refused(message.id, "this server was started again and has no model", is_unknown=True), ())
            case Push():
                self._push(message, arrays, answer)
            case Pull():
                self._answer_or_park(_Parked(message, answer))
            case Suspend():
                self.ledger.suspend(message.worker)
                answer(Done(message.id, self.ledger.version), ())
                self._answer_parked()
            case Leave():
                self.lost(message.worker)
                answer(Done(message.id, self.ledger.version), ())

    def lost(self, worker: int) -> None:
        """Nobody waits for a worker any more. What it has pushed counts.

        Args:
            worker: its task's number; may be unknown.
        """
        self._incarnations.pop(worker, None)
        self.ledger.leave(worker)
        self._parked = [one for one in self._parked if one.message.worker != worker]
        self._update()

    def _attach(self, message: Attach, answer: Answer) -> None:
        if self.digest not in (None, message.digest):
            answer(Refused(message.id, self._another_model(message.digest)), ())
            return
        if self._incarnations.get(message.worker) != message.incarnation:
            self._incarnations[message.worker] = message.incarnation
            self.ledger.enter(message.worker, self._sequences.get((message.worker, message.incarnation), -1))
        answer(Attached(message.id, self.ledger.workers[message.worker].clock, self.store is not None), ())

    def _another_model(self, digest: str) -> str:
        return (
            f"another model: this server holds one with the digest {self.digest}, the worker's is {digest}. Every task "
            "must build the same model, with the same number of servers."
        )

    def _create(self, message: Create, arrays: list[np.ndarray], answer: Answer) -> None:
        if self.digest not in (None, message.digest):
            answer(Refused(message.id, self._another_model(message.digest)), ())
            return
        if self.store is None:
            try:
                state = State.of_arrays(arrays, len(message.held), message.slots, message.scalars)
                self.store = Store(message.held, state, message.optimizer)
            except Exception as error:  # of Keras, for what the chief has sent
                answer(Refused(message.id, f"the model cannot be made: {type(error).__name__}: {error}"), ())
                return
            self.digest = message.digest
        answer(Done(message.id, self.ledger.version), ())
        self._answer_parked()

    def _push(self, message: Push, arrays: list[np.ndarray], answer: Answer) -> None:
        assert self.store is not None
        if not self.ledger.is_duplicate(message.worker, message.sequence):
            try:
                gradients = Gradients.received(message.kinds, arrays, self.store.shapes)
                if message.learning_rate is not None:
                    self.store.set_learning_rate(message.learning_rate)
            except (ValueError, TypeError) as error:
                answer(Refused(message.id, str(error)), ())
                return
            counted = self.ledger.push(message.worker, message.sequence, message.clock, message.read, message.samples)
            self._sequences[message.worker, message.incarnation] = message.sequence
            if counted is not None:
                self._gradients[id(counted)] = gradients
            self._update()
        if message.pulls:
            self._answer_or_park(_Parked(message, answer))
        else:
            answer(Done(message.id, self.ledger.version), ())

    def _update(self) -> None:
        """Makes the updates that are due, and answers what may be answered then."""
        while due := self.ledger.due():
            assert self.store is not None
            gradients = [self._gradients.pop(id(one)) for one in due]
            self.store.update(weighted_sum(gradients, weights(due), self.store.shapes))
        self._answer_parked()

    def _answer_or_park(self, one: _Parked) -> None:
        """A worker has one such message at a time; the same one may come again."""
        self._parked = [other for other in self._parked if other.message.worker != one.message.worker]
        if self._may_be_answered(one):
            self._answer(one)
        else:
            self._parked.append(one)
            one.answer(Waiting(one.message.id), ())

    def _answer_parked(self) -> None:
        ready = [one for one in self._parked if self._may_be_answered(one)]
        if ready:
            self._parked = [one for one in self._parked if one not in ready]
            for one in ready:
                self._answer(one)

    def _may_be_answered(self, one: _Parked) -> bool:
        if self.store is None:
            return False
        return isinstance(one.message, Pull) or self.ledger.may_read(self.ledger.workers[one.message.worker].clock)

    def _answer(self, one: _Parked) -> None:
        assert self.store is not None
        message = one.message
        what = message.what if isinstance(message, Pull) else "values"
        slots: tuple[tuple[str, ...], ...] = ()
        scalars: tuple[str, ...] = ()
        arrays = self.store.vectors()
        if what == "averages":
            arrays = self.store.averages() or arrays
        elif what == "state":
            state = self.store.state()
            (slots, scalars), arrays = state.names(), state.arrays()
        clock = self.ledger.workers[message.worker].clock
        one.answer(Values(message.id, self.ledger.version, self.store.iterations, clock, slots, scalars), arrays)
