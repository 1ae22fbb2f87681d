"""A server's part of the model: what each message does to it, and what is answered. It knows no sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tfdist.parameter_server.ledger import Ledger, weights
from tfdist.parameter_server.messages import (
    Attach,
    Attached,
    Create,
    Done,
    Gradient,
    Leave,
    Pull,
    Push,
    Refused,
    SetLearningRate,
    Values,
    Waiting,
)
from tfdist.parameter_server.store import Store
from tfdist.parameter_server.wire import Message

Answer = Callable[[Message, Sequence[np.ndarray]], None]
"""Sends an answer to where a message came from."""


@dataclass
class _Parked:
    """A pull that has to wait.

    Attributes:
        pull: the message.
        answer: to its sender.
    """

    pull: Pull
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
    _gradients: dict[int, list[Gradient]] = field(default_factory=dict)
    _pulls: list[_Parked] = field(default_factory=list)
    _shapes: list[tuple[int, ...]] = field(default_factory=list)

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
            case Push() | Pull() | Leave() if self._incarnations.get(message.worker) != message.incarnation:
                why = f"worker {message.worker} has not attached, or was taken for lost"
                answer(Refused(message.id, why, is_unknown=True), ())
            case Push():
                self._push(message, arrays, answer)
            case Pull():
                self._pull(message, answer)
            case SetLearningRate():
                self._set_learning_rate(message, answer)
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
        self._pulls = [one for one in self._pulls if one.pull.worker != worker]
        self._update()

    def _attach(self, message: Attach, answer: Answer) -> None:
        if self.digest not in (None, message.digest):
            answer(Refused(message.id, self._another_model(message.digest)), ())
            return
        if self._incarnations.get(message.worker) != message.incarnation:
            self._incarnations[message.worker] = message.incarnation
            self.ledger.enter(message.worker)
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
            if len(arrays) != len(message.held):
                answer(Refused(message.id, f"{len(arrays)} arrays for {len(message.held)} variables"), ())
                return
            try:
                self.store = Store([held.path for held in message.held], arrays, message.optimizer)
            except Exception as error:  # of Keras, for what the chief has sent
                answer(Refused(message.id, f"the optimizer cannot be made: {type(error).__name__}: {error}"), ())
                return
            self.digest = message.digest
            self._shapes = [array.shape for array in arrays]
        answer(Done(message.id, self.ledger.version), ())
        self._answer_pulls()

    def _push(self, message: Push, arrays: list[np.ndarray], answer: Answer) -> None:
        if self.store is None:
            answer(Refused(message.id, "the chief has not given the model yet"), ())
            return
        if not self.ledger.is_duplicate(message.worker, message.sequence):
            try:
                gradients = _gradients(message.kinds, arrays, self._shapes)
            except ValueError as error:
                answer(Refused(message.id, str(error)), ())
                return
            counted = self.ledger.push(message.worker, message.sequence, message.clock, message.read, message.samples)
            if counted is not None:
                self._gradients[id(counted)] = gradients
            self._update()
        answer(Done(message.id, self.ledger.version), ())

    def _pull(self, message: Pull, answer: Answer) -> None:
        """A worker has one pull at a time; the same one may come again."""
        self._pulls = [one for one in self._pulls if one.pull.worker != message.worker]
        self._pulls.append(_Parked(message, answer))
        self._answer_pulls()
        if any(one.pull is message for one in self._pulls):
            answer(Waiting(message.id), ())

    def _update(self) -> None:
        """Makes the updates that are due, and answers the pulls that may be answered then."""
        while due := self.ledger.due():
            assert self.store is not None
            self.store.update([self._gradients.pop(id(one)) for one in due], weights(due))
        self._answer_pulls()

    def _answer_pulls(self) -> None:
        if self.store is None:
            return
        ready = [one for one in self._pulls if self.ledger.may_read(one.pull.clock)]
        if not ready:
            return
        self._pulls = [one for one in self._pulls if not self.ledger.may_read(one.pull.clock)]
        values = self.store.values()
        for one in ready:
            one.answer(Values(one.pull.id, self.ledger.version, self.store.iterations), values)

    def _set_learning_rate(self, message: SetLearningRate, answer: Answer) -> None:
        if self.store is None:
            answer(Refused(message.id, "the chief has not given the model yet"), ())
            return
        try:
            self.store.set_learning_rate(message.value)
        except TypeError as error:
            answer(Refused(message.id, str(error)), ())
            return
        answer(Done(message.id, self.ledger.version), ())


def _gradients(kinds: Sequence[str], arrays: list[np.ndarray], shapes: Sequence[tuple[int, ...]]) -> list[Gradient]:
    """The gradients of a push, one for each variable.

    Raises:
        ValueError: they do not fit the variables.
    """
    if len(kinds) != len(shapes):
        raise ValueError(f"{len(kinds)} gradients for {len(shapes)} variables")
    left = iter(arrays)
    found: list[Gradient] = []
    try:
        for kind, shape in zip(kinds, shapes, strict=True):
            if kind == "none":
                found.append(None)
            elif kind == "dense":
                found.append(_checked(next(left), shape))
            else:
                rows, indices = next(left), next(left)
                _checked(rows, (len(indices), *shape[1:]))
                if indices.size and not 0 <= indices.min() <= indices.max() < shape[0]:
                    raise ValueError(f"rows from {indices.min()} to {indices.max()} of a variable of {shape[0]}")
                found.append((rows, indices))
    except StopIteration:
        raise ValueError(f"{len(arrays)} arrays are too few for gradients of the kinds {list(kinds)}") from None
    if next(left, None) is not None:
        raise ValueError(f"{len(arrays)} arrays are too many for gradients of the kinds {list(kinds)}")
    return found


def _checked(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if array.shape != shape:
        raise ValueError(f"a gradient of shape {array.shape} for a variable of shape {shape}")
    return array
