"""A server's part of a model: handles each message and answers it. It uses no sockets."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from tfdist.errors import TfdistError
from tfdist.parameter_server.dealing.deals import Answer
from tfdist.parameter_server.protocol.gradients import PushedGradients, weighted_sum
from tfdist.parameter_server.protocol.messages import (
    AssignValues,
    Attach,
    Attached,
    CreateShard,
    Done,
    LeaveModel,
    OpenedMemory,
    OpenMemory,
    Pull,
    PullKind,
    Push,
    ReadModel,
    Refused,
    Suspend,
    Values,
    Waiting,
)
from tfdist.parameter_server.protocol.packing import VariableSpec
from tfdist.parameter_server.protocol.report import ModelReport, WorkerReport
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState, rows_of_sequences
from tfdist.parameter_server.protocol.wire import Message, WorkerMessage
from tfdist.parameter_server.shard import answers, saved
from tfdist.parameter_server.shard.assignments import Assignments
from tfdist.parameter_server.shard.feature import ShardFeature
from tfdist.parameter_server.shard.hogwild_store import MemoryStore
from tfdist.parameter_server.shard.ledger import Ledger, weights
from tfdist.parameter_server.shard.store import Store
from tfdist.parameter_server.shard.stores import NewStore
from tfdist.parameter_server.shard.tickets import Tickets
from tfdist.parameter_server.snapshots.running import Snapshots

IMPORT_IT = (
    " Import the module that defines it on the parameter servers, too: above the strategy in the script, or with "
    "`tfdist serve --import MODULE`."
)


@dataclass
class _Traffic:
    """Counters of a shard's traffic, for reports.

    Attributes:
        received: bytes of arrays from workers.
        sent: bytes of arrays to workers.
        waited: by worker, seconds that its answers have waited.
    """

    received: int = 0
    sent: int = 0
    waited: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class ParkedMessage:
    """A message whose answer has to wait.

    Attributes:
        message: the worker's message.
        answer: function that sends the answer.
        is_refused: whether the message is a push that is not applied because its batch is dealt again.
        since: time of arrival, on the monotonic clock.
    """

    message: Pull | Push
    answer: Answer
    is_refused: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class PendingPush:
    """The gradients of one push that wait to be applied.

    Attributes:
        source: worker and incarnation.
        read: version of the parameters that the gradients were computed at.
        gradients: the gradients as received.
        ticket: ticket of the batch; None if the dealer did not deal it.
        parts: worker, incarnation and sequence of each push that a host's server joined into this one.
    """

    source: tuple[int, int]
    read: int
    gradients: PushedGradients
    ticket: int | None = None
    parts: tuple[tuple[int, int, int], ...] = ()


@dataclass
class Shard:
    """One server's part of one model, used by one thread.

    Attributes:
        ledger: bookkeeping of the pushes.
        snapshots: this server's snapshots of the model; None keeps none.
        features: features that take part in what the shard does.
        new_store: function that makes the store.
        store: the values; None until a worker has described them.
        tickets: bookkeeping of pushes whose batches were dealt.
        model: name of the model.
        is_restored: whether the store was made from a snapshot.
        incarnations: by worker, the incarnation of the process that has entered.
        sequences: by worker and incarnation, the sequence of the last push that was counted.
        applied: by worker and incarnation, the sequence of the last push that was applied.
        pushed: pushes that wait to be applied, by the Python `id` of their `Gradient` in the ledger.
        assigned: the last assignments to the variables.
    """

    ledger: Ledger
    snapshots: Snapshots | None = None
    features: Sequence[ShardFeature] = ()
    new_store: NewStore = Store
    store: Store | MemoryStore | None = None
    model: str = ""
    is_restored: bool = False
    incarnations: dict[int, int] = field(default_factory=dict)
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    applied: dict[tuple[int, int], int] = field(default_factory=dict)
    pushed: dict[int, PendingPush] = field(default_factory=dict)
    assigned: Assignments = field(default_factory=Assignments)
    tickets: Tickets = field(init=False)
    _parked: list[ParkedMessage] = field(default_factory=list)
    _traffic: _Traffic = field(default_factory=_Traffic)

    def __post_init__(self) -> None:
        self.tickets = Tickets(self.ledger)

    def heard(self, message: Message, arrays: list[np.ndarray], answer: Answer) -> None:
        """Handles a worker's message.

        Args:
            message: the message.
            arrays: the message's arrays; read-only views that do not change before the answer.
            answer: function that sends the answer; may be called later.
        """
        self._traffic.received += sum(array.nbytes for array in arrays)
        match message:
            case Attach():
                self._attach(message, answer)
            case CreateShard() | Push() | Pull() | AssignValues() | OpenMemory() | Suspend() | LeaveModel() if (
                not self._knows(message)
            ):
                why = f"worker {message.worker} has not attached, or was taken for lost"
                answer(Refused(message.id, why, is_unknown=True), ())
            case CreateShard():
                self._create(message, arrays, answer)
            case Push() | AssignValues() | OpenMemory() if self.store is None:
                answer(Refused(message.id, "this server was started again and has no model", is_unknown=True), ())
            case Push():
                self._push(message, arrays, answer)
            case Pull():
                self._answer_or_park(ParkedMessage(message, answer))
            case AssignValues():
                self._put(message, arrays, answer)
            case OpenMemory():
                self._open_memory(message, answer)
            case Suspend():
                self.ledger.suspend(message.worker, message.is_end, message.id)
                answer(Done(message.id, self.ledger.version), ())
                self._update()
            case LeaveModel():
                self.lost(message.worker)
                answer(Done(message.id, self.ledger.version), ())

    def lost(self, worker: int) -> None:
        """Stops waiting for a worker. Its pushes still count.

        Args:
            worker: task number of the worker; may be unknown.
        """
        self.incarnations.pop(worker, None)
        self.ledger.leave(worker)
        self._parked = [parked for parked in self._parked if parked.message.worker != worker]
        self._update()
        for feature in self.features:
            feature.forget(worker)

    def set_idle(self, workers: frozenset[int]) -> None:
        """Sets which workers wait for a batch. No round waits for them.

        Args:
            workers: numbers of all workers that wait for a batch.
        """
        self.ledger.set_idle(workers)
        self._update()

    def absent(self, worker: int) -> None:
        """Lets rounds go on without a worker that the job names but that takes no part in this call of `fit`.

        Args:
            worker: task number of the worker.
        """
        self.ledger.awaited.discard(worker)
        self._update()

    def refuse(self, worker: int, why: str) -> bool:
        """Refuses the parked requests of a worker.

        Args:
            worker: task number of the worker.
            why: reason in words.

        Returns:
            Whether there was any.
        """
        refused = [parked for parked in self._parked if parked.message.worker == worker]
        for parked in refused:
            parked.answer(Refused(parked.message.id, why), ())
            self._parked.remove(parked)
        return bool(refused)

    def report(self, model: str, occurrence: int) -> ModelReport:
        """Returns a report of the shard's progress and traffic.

        Args:
            model: name of the model.
            occurrence: number of earlier models of this name.
        """
        self._settle()
        known = self.ledger.workers
        workers = tuple(
            WorkerReport(
                number,
                number in known,
                number in known and (known[number].is_active or self.ledger.synchronization.in_rounds),
                known[number].clock if number in known else 0,
                self.ledger.counted[number],
                self.ledger.dropped[number],
                self._traffic.waited[number],
            )
            for number in sorted({*known, *self.ledger.counted, *self.ledger.dropped})
        )
        shapes = None if self.store is None else self.store.shapes
        return ModelReport(
            model=model,
            occurrence=occurrence,
            variables=0 if self.store is None else len(self.store.held),
            nbytes=0 if shapes is None else shapes.nbytes,
            version=self.ledger.version,
            received=self._traffic.received,
            sent=self._traffic.sent,
            staleness=dict(self.ledger.staleness),
            workers=workers,
        )

    def close(self) -> None:
        """Writes a last snapshot, and waits until it is written."""
        if self.snapshots is not None:
            self.snapshots.wait()  # an earlier snapshot may still be being written
            self.take_snapshot()
            self.snapshots.wait()

    def _knows(self, sender: WorkerMessage) -> bool:
        return self.incarnations.get(sender.worker) == sender.incarnation

    def _attach(self, message: Attach, answer: Answer) -> None:
        if self.incarnations.get(message.worker) != message.incarnation:
            self.incarnations[message.worker] = message.incarnation
            self.ledger.enter(message.worker, self.sequences.get((message.worker, message.incarnation), -1))
        for feature in self.features:
            feature.attached(message.worker)
        counted = rows_of_sequences(self.sequences) if message.joins else ()
        answer(Attached(message.id, self.ledger.workers[message.worker].clock, self.store is not None, counted), ())

    def _create(self, message: CreateShard, arrays: list[np.ndarray], answer: Answer) -> None:
        if self.store is None:
            try:
                self._make(message, arrays)
            except Exception as error:  # Keras refuses what the worker has sent, or the snapshot is of another model
                why = str(error) if isinstance(error, TfdistError) else f"{type(error).__name__}: {error}"
                rest = IMPORT_IT if "Could not locate" in why else ""
                answer(Refused(message.id, f"the model cannot be made: {why}{rest}"), ())
                return
        answer(Done(message.id, self.ledger.version), ())
        self._answer_parked()

    def _make(self, message: CreateShard, arrays: list[np.ndarray]) -> None:
        """Makes the store from a snapshot or from the message's values. Without both, the shard waits for the chief."""
        state = (
            TrainingState.of_arrays(arrays, len(message.held), message.slots, message.scalars)
            if message.has_values
            else None
        )
        snapshot = self.snapshots.find(message.model, message.held) if self.snapshots is not None else None
        if snapshot is not None:
            state = saved.restored(self, snapshot)
        self.model = message.model
        self.is_restored = snapshot is not None
        if state is not None:
            self.make_store(message.held, message.optimizer, state)
            self.take_snapshot()

    def make_store(self, held: Sequence[HeldRows], optimizer: dict[str, Any], state: TrainingState) -> None:
        """Makes the store, and begins the features with its variables.

        Args:
            held: descriptions of the variables.
            optimizer: the optimizer, serialized by `keras.saving.serialize_keras_object`.
            state: values of the variables, and the optimizer's variables.

        Raises:
            Exception: Keras cannot deserialize the optimizer, for example as it is not registered in this process.
        """
        self.store = self.new_store(held, state, optimizer)
        pairs = zip(held, self.store.shapes.shapes, strict=True)
        whole = [VariableSpec(variable.path, (variable.rows, *shape[1:]) if shape else ()) for variable, shape in pairs]
        for feature in self.features:
            feature.begin(whole, self.store.shapes)

    def take_snapshot(self) -> None:
        """Writes a snapshot of all applied updates, in the background."""
        if self.snapshots is None or self.store is None:
            return
        self._settle()
        number = self.ledger.version, self.store.edition  # assignments raise the edition only
        self.snapshots.write(saved.state_of(self), number)

    def _push(self, message: Push, arrays: list[np.ndarray], answer: Answer) -> None:
        assert self.store is not None
        is_refused = self.tickets.is_refused(message)
        if not is_refused and not self.ledger.is_duplicate(message.worker, message.sequence):
            try:
                gradients = self._received(message, arrays)
                if message.learning_rate is not None:
                    self.store.set_learning_rate(message.learning_rate)
            except (ValueError, TypeError) as error:
                answer(Refused(message.id, str(error)), ())
                return
            counted = self.tickets.counted(message)
            source = message.worker, message.incarnation
            pushes = ((*source, message.sequence), *message.parts)
            _note(self.sequences, pushes)
            if counted is None:
                _note(self.applied, pushes)
            else:
                self.pushed[id(counted)] = PendingPush(source, message.read, gradients, message.ticket, message.parts)
            is_refused = self.tickets.settle(message, counted)
            self._update()
            if counted is not None and id(counted) in self.pushed and not self.ledger.synchronization.in_rounds:
                # The worker is answered before the update, and then reuses the memory that it shares with this server.
                waiting = self.pushed[id(counted)]
                self.pushed[id(counted)] = replace(waiting, gradients=gradients.copy())
        self._answer_or_park(ParkedMessage(message, answer, is_refused))

    def _received(self, message: Push, arrays: list[np.ndarray]) -> PushedGradients:
        assert self.store is not None
        decoded = (feature.received(message, arrays) for feature in self.features)
        pushed = next((gradients for gradients in decoded if gradients is not None), None)
        return pushed or PushedGradients.received(message.kinds, arrays, self.store.shapes)

    def _put(self, message: AssignValues, arrays: list[np.ndarray], answer: Answer) -> None:
        assert self.store is not None
        if self.assigned.is_duplicate(message):
            answer(Done(message.id, self.ledger.version), ())
            return
        try:
            self.store.assign(arrays)
        except ValueError as error:
            answer(Refused(message.id, str(error)), ())
        else:
            self.assigned.note(message, self.ledger.version)
            answer(Done(message.id, self.ledger.version), ())

    def _open_memory(self, message: OpenMemory, answer: Answer) -> None:
        assert self.store is not None
        try:
            where, place = self.store.opened(message.worker)
        except ValueError as error:
            answer(Refused(message.id, str(error)), ())
        else:
            answer(OpenedMemory(message.id, where, place), ())

    def _settle(self) -> None:
        """Counts the updates that workers have made to the values themselves."""
        if self.store is not None:
            self.store.settle(self.ledger)

    def _update(self) -> None:
        """Makes the updates that are due, and answers the requests that waited for them."""
        while due := self.ledger.due():
            assert self.store is not None
            pushed = [self.pushed.pop(id(push)) for push in due]
            gradients = [
                self._corrected(push) if known.staleness else push.gradients
                for push, known in zip(pushed, due, strict=True)
            ]
            self.store.update(weighted_sum(gradients, weights(due), self.store.shapes))
            self.tickets.updated(due)
            for push, known in zip(pushed, due, strict=True):
                _note(self.applied, ((*push.source, known.sequence), *push.parts))
        self._answer_parked()

    def _corrected(self, pushed: PendingPush) -> PushedGradients:
        """Returns late gradients as they are to be applied."""
        assert self.store is not None
        gradients = pushed.gradients
        for feature in self.features:
            gradients = feature.corrected(pushed.source[0], pushed.read, gradients, self.store.vectors)
        return gradients

    def _answer_or_park(self, parked: ParkedMessage) -> None:
        """Answers a message, now or later. A repeated message replaces its earlier copy."""
        mine = parked.message.worker, parked.message.id
        self._parked = [other for other in self._parked if (other.message.worker, other.message.id) != mine]
        if self._may_be_answered(parked):
            self._answer(parked)
        else:
            self._parked.append(parked)
            parked.answer(Waiting(parked.message.id, self._awaited_by(parked)), ())

    def _answer_parked(self) -> None:
        ready = [parked for parked in self._parked if self._may_be_answered(parked)]
        if ready:
            self._parked = [parked for parked in self._parked if parked not in ready]
            for parked in ready:
                self._answer(parked)

    def _may_be_answered(self, parked: ParkedMessage) -> bool:
        if self.store is None:
            return False
        return isinstance(parked.message, Pull) or self.ledger.may_read(parked.message.worker)

    def _awaited_by(self, parked: ParkedMessage) -> tuple[int, ...]:
        """Returns the workers that an answer waits for. Without values it waits for the chief, which gives them."""
        return (0,) if self.store is None else tuple(sorted(self.ledger.awaited_by(parked.message.worker)))

    def _answer(self, parked: ParkedMessage) -> None:
        assert self.store is not None
        message, clock = parked.message, self.ledger.workers[parked.message.worker].clock
        if isinstance(message, Pull):
            values, arrays = self._whole(message.id, message.what, clock)
        else:
            self._settle()
            values, arrays = answers.newer(self.store, self.ledger.version, self.features, message, clock)
        if isinstance(message, Push) or message.what == "values":
            for feature in self.features:
                feature.sent(message.worker, self.ledger.version, self.store.vectors)
        self._traffic.sent += sum(array.nbytes for array in arrays)
        self._traffic.waited[message.worker] += time.monotonic() - parked.since
        if isinstance(message, Push) and message.ticket is not None:
            values = msgspec.structs.replace(
                values, is_refused=parked.is_refused, decision=self.tickets.decision(message)
            )
        parked.answer(values, arrays)

    def _whole(self, id: int, what: PullKind, clock: int) -> tuple[Values, list[np.ndarray]]:
        assert self.store is not None
        self._settle()
        return answers.whole(self.store, self.ledger.version, self.assigned, id, what, clock)

    def read(self, message: ReadModel) -> tuple[Values, list[np.ndarray]] | None:
        """Returns the answer to a task that takes no part in the training; None while there are no values.

        Args:
            message: request of the task.
        """
        return None if self.store is None else self._whole(message.id, message.what, clock=0)


def _note(sequences: dict[tuple[int, int], int], pushes: Iterable[tuple[int, int, int]]) -> None:
    """Records the highest sequence of each worker and incarnation."""
    for worker, incarnation, sequence in pushes:
        sequences[worker, incarnation] = max(sequence, sequences.get((worker, incarnation), -1))
