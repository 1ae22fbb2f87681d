"""A host's server's part of one model: it joins its workers' gradients and pushes them to the roots."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from tfdist.errors import TfdistError
from tfdist.parameter_server.dealing.deals import Answer
from tfdist.parameter_server.hierarchy.mirror import Mirror
from tfdist.parameter_server.hierarchy.splitting import split_by_root
from tfdist.parameter_server.hierarchy.uplink import Connect, Post, Uplink
from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes, weighted_sum
from tfdist.parameter_server.protocol.messages import (
    AssignValues,
    Attach,
    CreateShard,
    Done,
    LeaveModel,
    Pull,
    Push,
    Refused,
    Suspend,
    Values,
    Waiting,
)
from tfdist.parameter_server.protocol.programs import CHIEF
from tfdist.parameter_server.protocol.state import TrainingState
from tfdist.parameter_server.protocol.wire import Message
from tfdist.parameter_server.shard.ledger import weights
from tfdist.parameter_server.shard.serialized_optimizers import deserialized
from tfdist.parameter_server.shard.shard import IMPORT_IT, ParkedMessage, Shard
from tfdist.parameter_server.shard.store import is_elementwise
from tfdist.parameter_server.worker.client import MessageRefusedError
from tfdist.parameter_server.worker.model import Model
from tfdist.parameter_server.worker.session import Session

Key = tuple[int, int, int]
"""Worker, incarnation and ``id`` of a request, which identify a repeated request."""


@dataclass(frozen=True)
class RootAccess:
    """A host's server's access to the roots.

    Attributes:
        number: number of this server's task, under which it pushes.
        roots: numbers of the roots' tasks.
        has_chief: whether the chief is one of this server's workers.
        connect: function that connects to the roots.
        post: function that has the server's thread call a function.
        program: random number of this process, by which the roots tell it from a restarted process.
    """

    number: int
    roots: tuple[int, ...]
    has_chief: bool
    connect: Connect
    post: Post
    program: int = field(default_factory=lambda: secrets.randbits(63))


@dataclass(frozen=True)
class _FetchedValues:
    """Values that were read from the roots.

    Attributes:
        vectors: values in the layout of all variables.
        version: lowest version of all roots.
        iterations: number of updates of the roots' optimizer.
    """

    vectors: list[np.ndarray]
    version: int
    iterations: int


@dataclass
class HostShard(Shard):
    """A shard whose updates are made at the roots, for one thread. Requests to the roots have another (`Uplink`).
    The ledger joins gradients as a root's ledger would average them. A worker gets its answer when the roots have
    counted the push that contains its gradient; gradients that `SoftSync` keeps for a later push are answered at once.
    Versions are the roots'.

    If the roots cannot be reached, or refuse a request, the workers are refused with the reason, and the shard begins
    anew.

    Attributes:
        above: access to the roots.
    """

    above: RootAccess = field(kw_only=True)
    store: Any = None
    _begun: Attach | None = None
    _model: Model | None = None
    _uplink: Uplink | None = None
    _first: Future[TrainingState] = field(default_factory=Future)
    _creating: dict[Key, Answer] = field(default_factory=dict)
    _asked: dict[Key, Answer] = field(default_factory=dict)
    _in_flight: set[tuple[int, int]] = field(default_factory=set)
    _active: set[int] = field(default_factory=set)
    _suspensions: dict[tuple[int, int], int] = field(default_factory=dict)
    _ended: dict[int, int] = field(default_factory=dict)
    _ends: int = 0
    _is_over: bool = False

    def heard(self, message: Message, arrays: list[np.ndarray], answer: Answer) -> None:
        """Handles a worker's message; see `Shard.heard`."""
        if isinstance(message, Attach):
            self._begun = message
            if self.incarnations.get(message.worker) != message.incarnation:
                self._active.discard(message.worker)
                self._ended[message.worker] = self._ends
        elif isinstance(message, (Push, Suspend, LeaveModel)) and self._knows(message):
            self._note(message)
        super().heard(message, arrays, answer)
        if isinstance(message, Suspend):
            self._rest()

    def lost(self, worker: int) -> None:
        """Stops waiting for a worker. Without any workers, the roots stop waiting for this server."""
        for kept in (self._creating, self._asked):
            for key in [key for key in kept if key[0] == worker]:
                del kept[key]
        self._active.discard(worker)
        self._ended.pop(worker, None)
        is_ours = worker in self.ledger.workers or worker in self.ledger.awaited
        super().lost(worker)
        if is_ours:
            self._rest()

    def take_snapshot(self) -> None:
        """Does nothing: the roots keep the snapshots."""

    def close(self) -> None:
        """Leaves the roots, and ends the thread."""
        if self._uplink is not None:
            if self.store is None:
                self._uplink.abandon()
            elif self.ledger.workers:
                self._uplink.ask(lambda session: session.leave())
            self._first.cancel()
            self._uplink.close()

    def _note(self, message: Push | Suspend | LeaveModel) -> None:
        """Records which workers are active, and which have ended a call of `fit`."""
        worker = message.worker
        if isinstance(message, Push):
            self._active.add(worker)
        elif isinstance(message, LeaveModel):
            self._is_over |= message.is_over
        elif message.id > self._suspensions.get((worker, message.incarnation), -1):  # not a repeated message
            self._suspensions[worker, message.incarnation] = message.id
            self._active.discard(worker)
            self._ended[worker] = self._ended.get(worker, self._ends) + message.is_end

    def _rest(self) -> None:
        """Tells the roots when they need not wait for this server's next push."""
        if self._uplink is None or self.store is None:
            return
        if not self.ledger.workers:
            is_over, self._is_over = self._is_over, False
            self._uplink.ask(lambda session: session.leave(is_over))
            return
        ends = min(self._ended.get(worker, self._ends) for worker in self.ledger.workers)
        if not self.ledger.awaited and ends > self._ends:
            for _ in range(ends - self._ends):
                self._uplink.ask(lambda session: session.suspend(is_end=True))
            self._ends = ends
        elif not self._active:
            self._uplink.ask(lambda session: session.suspend())

    # The model.

    def _create(self, message: CreateShard, arrays: list[np.ndarray], answer: Answer) -> None:
        if self.store is not None:
            answer(Done(message.id, self.ledger.version), ())
            return
        try:
            if message.has_values and not self._first.done():
                state = TrainingState.of_arrays(arrays, len(message.held), message.slots, message.scalars)
                self._first.set_result(state)
            if self._uplink is None:
                self._begin(message)
        except Exception as error:  # Keras refuses what the worker has sent
            why = _explained(error)
            rest = IMPORT_IT if "Could not locate" in why else ""
            answer(Refused(message.id, f"the model cannot be made: {why}{rest}"), ())
            return
        self._creating[message.worker, message.incarnation, message.id] = answer
        answer(Waiting(message.id, (CHIEF,)), ())

    def _begin(self, message: CreateShard) -> None:
        """Begins the model at the roots."""
        begun = self._begun
        assert begun is not None
        shapes = Shapes(message.shapes, [np.dtype(name) for name in message.dtypes])
        splits = is_elementwise(deserialized(message.optimizer))
        model = Model(
            [variable.path for variable in message.held],
            shapes.shapes,
            shapes.dtypes,
            len(self.above.roots),
            [splits and variable.constraint is None for variable in message.held],
            options=begun.options,
        )
        model.name, model.described = message.model, begun.variables  # as the workers send them
        before = [message.model] * begun.occurrence + [""] * (begun.place - begun.occurrence)
        mirror = Mirror(message.held, shapes, message.optimizer)
        values = self._values_of(self._first, mirror) if self.above.has_chief else None

        def make(connections: Any) -> Session:
            return Session(connections, self.above.number, model, before, joins=True, program=self.above.program)

        def work(session: Session) -> tuple[_FetchedValues, dict[tuple[int, int], int]]:
            session.begin(message.held, message.optimizer, values, follows=False)
            return _fetched(session, shapes), session.counted

        self._uplink = Uplink(self.above.connect, make, self.above.post, self._failed)
        self._uplink.ask(work, partial(self._made, mirror, model))

    def _values_of(self, first: Future[TrainingState], mirror: Mirror) -> Callable[[], TrainingState]:
        """Returns a function for the uplink's thread that gives the roots the values that they lack.

        It returns the chief's first values, or the newest values if there are any.
        """

        def values() -> TrainingState:
            if not mirror.vectors():
                return first.result()  # waits until the chief has given them
            if not first.done():
                return TrainingState(mirror.arrays())
            state = first.result()
            scalars = dict(state.scalars)
            if "iteration" in scalars:
                scalars["iteration"] = np.asarray(mirror.iterations, scalars["iteration"].dtype)
            return TrainingState(mirror.arrays(), state.slots, scalars)

        return values

    def _made(self, mirror: Mirror, model: Model, result: tuple[_FetchedValues, dict[tuple[int, int], int]]) -> None:
        """Takes over the roots' values and counts when the roots have the model. Workers may push from now on."""
        fetched, counted = result
        self.store, self.model, self._model = mirror, model.name, model
        self._take(fetched)
        self.sequences |= counted
        for worker, incarnation in self.incarnations.items():
            record = self.ledger.workers[worker]
            record.sequence = max(record.sequence, self.sequences.get((worker, incarnation), -1))
        waiting, self._creating = self._creating, {}
        for (_, _, id), answer in waiting.items():
            answer(Done(id, self.ledger.version), ())
        self._answer_parked()

    def _failed(self, error: Exception) -> None:
        """Refuses all waiting requests, and begins anew with the workers that attach again."""
        refused = error.refused if isinstance(error, MessageRefusedError) else None
        why = f"the root servers: {_explained(error) if refused is None else refused.why}"
        over = (False, False, None) if refused is None else (False, refused.is_over, refused.newest)
        for (_, _, id), answer in (*self._creating.items(), *self._asked.items()):
            answer(Refused(id, why, *over), ())
        for parked in self._parked:
            parked.answer(Refused(parked.message.id, why), ())
        for worker in list(self.ledger.workers):
            self.ledger.leave(worker)
        for kept in (self._creating, self._asked, self._in_flight, self._active, self.incarnations, self.pushed):
            kept.clear()
        self._parked.clear()
        self.ledger.waiting.clear()
        self._first.cancel()
        self.store, self._uplink, self._first = None, None, Future()

    # Exchanges with the roots.

    def _take(self, fetched: _FetchedValues) -> None:
        self.store.put(fetched.vectors, fetched.iterations)
        self.ledger.version = fetched.version

    def _update(self) -> None:
        """Pushes the gradients of each due update to the roots, joined into one push."""
        while due := self.ledger.due():
            assert self._uplink is not None
            assert self._model is not None
            self.ledger.version -= 1  # the roots count the updates
            pushed = [self.pushed.pop(id(push)) for push in due]
            shapes, model, rate = self.store.shapes, self._model, self.store.rate
            joined = split_by_root(
                weighted_sum([push.gradients for push in pushed], weights(due), shapes), shapes, model
            )
            parts = tuple((*push.source, known.sequence) for push, known in zip(pushed, due, strict=True))
            in_flight = {(worker, sequence) for worker, _, sequence in parts}
            self._in_flight |= in_flight
            samples, read = sum(push.samples for push in due), min(push.read for push in pushed)
            work = partial(_stepped, shapes, joined, samples, rate, read, parts)
            self._uplink.ask(work, partial(self._counted, in_flight))
        self._answer_parked()

    def _counted(self, in_flight: set[tuple[int, int]], fetched: _FetchedValues) -> None:
        """Takes over the roots' values after they have counted a push, and answers its workers."""
        self._in_flight -= in_flight
        self._take(fetched)
        self._answer_parked()

    def _put(self, message: AssignValues, arrays: list[np.ndarray], answer: Answer) -> None:
        try:
            layout = self.store.shapes.layout()
            layout.check(arrays)
        except ValueError as error:
            answer(Refused(message.id, str(error)), ())
            return
        values, shapes = list(layout.arrays(arrays).values()), self.store.shapes

        def work(session: Session) -> _FetchedValues:
            session.put(values)
            session.pull()
            return _fetched(session, shapes)

        def reply(fetched: _FetchedValues) -> tuple[Message, list[np.ndarray]]:
            self._take(fetched)
            return Done(message.id, self.ledger.version), []

        self._ask(message, answer, work, reply)

    def _pull(self, message: Pull, answer: Answer) -> None:
        """Answers with the current values of the roots."""
        shapes = self.store.shapes

        def work(session: Session) -> tuple[_FetchedValues, TrainingState]:
            state = TrainingState([])
            if message.what == "state":
                state = session.state()
            elif message.what in ("averages", "final"):
                values = session.averages() if message.what == "averages" else session.final()
                state = TrainingState(shapes.layout().vectors(values))
            session.pull()
            return _fetched(session, shapes), state

        def reply(result: tuple[_FetchedValues, TrainingState]) -> tuple[Message, list[np.ndarray]]:
            fetched, state = result
            self._take(fetched)
            arrays = state.arrays() or fetched.vectors
            slots, scalars = state.names()
            worker = self.ledger.workers.get(message.worker)
            self._traffic.sent += sum(array.nbytes for array in arrays)
            values = Values(
                message.id,
                fetched.version,
                fetched.iterations,
                0 if worker is None else worker.clock,
                slots,
                scalars,
                edition=self.store.edition,
            )
            return values, arrays

        self._ask(message, answer, work, reply)

    def _ask(
        self,
        message: Pull | AssignValues,
        answer: Answer,
        work: Callable[[Session], Any],
        reply: Callable[[Any], tuple[Message, list[np.ndarray]]],
    ) -> None:
        """Sends a request to the roots. If the message is repeated meanwhile, only its last sender is answered."""
        assert self._uplink is not None
        key = message.worker, message.incarnation, message.id
        is_new = key not in self._asked
        self._asked[key] = answer
        answer(Waiting(message.id, self.above.roots), ())

        def then(result: Any) -> None:
            answered = reply(result)
            if key in self._asked:
                self._asked.pop(key)(*answered)

        if is_new:
            self._uplink.ask(work, then)

    # Answers.

    def _answer_or_park(self, parked: ParkedMessage) -> None:
        if isinstance(parked.message, Pull) and self.store is not None:
            self._pull(parked.message, parked.answer)
        else:
            super()._answer_or_park(parked)

    def _may_be_answered(self, parked: ParkedMessage) -> bool:
        if isinstance(parked.message, Push) and (parked.message.worker, parked.message.sequence) in self._in_flight:
            return False
        return super()._may_be_answered(parked)

    def _awaited_by(self, parked: ParkedMessage) -> tuple[int, ...]:
        return super()._awaited_by(parked) or self.above.roots

    def _answer(self, parked: ParkedMessage) -> None:
        if isinstance(parked.message, Pull):
            self._pull(parked.message, parked.answer)
        else:
            super()._answer(parked)


def _explained(error: Exception) -> str:
    return str(error) if isinstance(error, TfdistError) else f"{type(error).__name__}: {error}"


def _stepped(
    shapes: Shapes,
    joined: list[PushedGradients],
    samples: float,
    rate: float | None,
    read: int,
    parts: tuple[tuple[int, int, int], ...],
    session: Session,
) -> _FetchedValues:
    session.step(joined, samples, rate, read=read, parts=parts)
    return _fetched(session, shapes)


def _fetched(session: Session, shapes: Shapes) -> _FetchedValues:
    """Returns a copy of the values that a session has read last, as the next answer reuses their memory."""
    return _FetchedValues(shapes.layout().vectors(session.values()), session.version, session.iterations)
