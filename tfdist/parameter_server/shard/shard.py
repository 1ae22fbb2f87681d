"""A server's part of the model: what each message does to it, and what is answered. It knows no sockets."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from tfdist.compression.policy import Policy
from tfdist.errors import TfdistError
from tfdist.parameter_server.dealing.deals import Answer
from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.protocol.differences import Differences
from tfdist.parameter_server.protocol.gradients import Gradients, weighted_sum
from tfdist.parameter_server.protocol.messages import (
    Attach,
    Attached,
    Create,
    Done,
    Leave,
    OpenedMemory,
    OpenMemory,
    Pull,
    Push,
    Put,
    Read,
    Refused,
    Suspend,
    Values,
    Waiting,
    What,
)
from tfdist.parameter_server.protocol.packing import Unpacker, Whole
from tfdist.parameter_server.protocol.report import ModelReport, WorkerReport
from tfdist.parameter_server.protocol.state import Held, State
from tfdist.parameter_server.protocol.wire import Message
from tfdist.parameter_server.shard.delay_compensation import DelayCompensation
from tfdist.parameter_server.shard.hogwild_store import MemoryStore
from tfdist.parameter_server.shard.ledger import Ledger, weights
from tfdist.parameter_server.shard.store import Store
from tfdist.parameter_server.shard.tickets import Tickets
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.snapshots.sharded import PartState, ShardState

IMPORT_IT = (
    " The parameter servers have to import the module that defines it: above the strategy in the script, or with "
    "`tfdist serve --import MODULE`."
)


@dataclass
class _Traffic:
    """What a shard has done, for reports.

    Attributes:
        received: bytes of arrays from workers.
        sent: bytes of arrays to workers.
        waited: by worker, seconds that answers have waited.
    """

    received: int = 0
    sent: int = 0
    waited: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Parked:
    """A message whose answer has to wait.

    Attributes:
        message: from a worker.
        answer: to its sender.
        is_refused: whether it is a push that was not applied, as its batch is dealt again.
        since: when it came, on the monotonic clock.
    """

    message: Pull | Push
    answer: Answer
    is_refused: bool = False
    since: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class Pushed:
    """Gradients that wait to be applied.

    Attributes:
        source: worker and incarnation.
        read: version of the parameters that they are of.
        gradients: as they came.
        ticket: of the batch, if it was dealt.
        parts: as of `tfdist.parameter_server.protocol.messages.Push`.
    """

    source: tuple[int, int]
    read: int
    gradients: Gradients
    ticket: int | None = None
    parts: tuple[tuple[int, int, int], ...] = ()


@dataclass
class Shard:
    """A shard, in one thread.

    Attributes:
        ledger: which pushes have counted.
        snapshots: of this server; None if it keeps none.
        compression: of gradients; None for none.
        pull_compression: of parameters; None for none.
        is_lazy: as of `Store`.
        is_hogwild: whether workers change the values themselves.
        store: its values; None until a worker has described them.
        tickets: of pushes whose batches were dealt.
        model: its name.
        is_restored: whether the store was made from a snapshot.
        incarnations: by worker, that of the process that has entered.
        sequences: by worker and incarnation, the sequence of the last push that was counted.
        applied: likewise, of the last push that was applied.
        pushed: by the `id` of a gradient of the ledger, what it stands for.
    """

    ledger: Ledger
    snapshots: Snapshots | None = None
    compression: Policy | None = None
    pull_compression: Policy | None = None
    is_lazy: bool = False
    is_hogwild: bool = False
    store: Store | MemoryStore | None = None
    model: str = ""
    is_restored: bool = False
    incarnations: dict[int, int] = field(default_factory=dict)
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    applied: dict[tuple[int, int], int] = field(default_factory=dict)
    pushed: dict[int, Pushed] = field(default_factory=dict)
    tickets: Tickets = field(init=False)
    _compensation: DelayCompensation | None = None
    _unpacker: Unpacker | None = None
    _differences: Differences | None = None
    _parked: list[Parked] = field(default_factory=list)
    _traffic: _Traffic = field(default_factory=_Traffic)
    _assigned_at: int = -1
    _puts: dict[int, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tickets = Tickets(self.ledger)

    def heard(self, message: Message, arrays: list[np.ndarray], answer: Answer) -> None:
        """Does what a message says.

        Args:
            message: from a worker.
            arrays: that came with it; read-only views, which stay as they are.
            answer: to its sender; may be used later.
        """
        self._traffic.received += sum(array.nbytes for array in arrays)
        match message:
            case Attach():
                self._attach(message, answer)
            case Create() | Push() | Pull() | Put() | OpenMemory() | Suspend() | Leave() if not self._knows(message):
                why = f"worker {message.worker} has not attached, or was taken for lost"
                answer(Refused(message.id, why, is_unknown=True), ())
            case Create():
                self._create(message, arrays, answer)
            case Push() | Put() | OpenMemory() if self.store is None:
                answer(Refused(message.id, "this server was started again and has no model", is_unknown=True), ())
            case Push():
                self._push(message, arrays, answer)
            case Pull():
                self._answer_or_park(Parked(message, answer))
            case Put():
                self._put(message, arrays, answer)
            case OpenMemory():
                self._open_memory(message, answer)
            case Suspend():
                self.ledger.suspend(message.worker, message.is_end, message.id)
                answer(Done(message.id, self.ledger.version), ())
                self._update()
            case Leave():
                self.lost(message.worker)
                answer(Done(message.id, self.ledger.version), ())

    def lost(self, worker: int) -> None:
        """Nobody waits for a worker any more. What it has pushed counts.

        Args:
            worker: its task's number; may be unknown.
        """
        self.incarnations.pop(worker, None)
        self.ledger.leave(worker)
        self._parked = [one for one in self._parked if one.message.worker != worker]
        self._update()
        if self._compensation is not None:
            self._compensation.forget(worker)
        if self._differences is not None:
            self._differences.forget(worker)

    def set_idle(self, workers: frozenset[int]) -> None:
        """No round waits for workers that wait for a batch.

        Args:
            workers: all that do.
        """
        self.ledger.set_idle(workers)
        self._update()

    def absent(self, worker: int) -> None:
        """A worker that the job names takes no part in this call of `fit`: no round waits until it enters.

        Args:
            worker: its task's number.
        """
        self.ledger.awaited.discard(worker)
        self._update()

    def refuse(self, worker: int, why: str) -> None:
        """Refuses what a worker waits for.

        Args:
            worker: its task's number.
            why: for a person to read.
        """
        for one in [one for one in self._parked if one.message.worker == worker]:
            one.answer(Refused(one.message.id, why), ())
            self._parked.remove(one)

    def report(self, model: str, occurrence: int) -> ModelReport:
        """What it has done so far.

        Args:
            model: the name of its model.
            occurrence: how many models of this name came before it.
        """
        self._settle()
        known = self.ledger.workers
        workers = tuple(
            WorkerReport(
                *(
                    number,
                    number in known,
                    number in known and (known[number].is_active or self.ledger.synchronization.in_rounds),
                ),
                known[number].clock if number in known else 0,
                *(self.ledger.counted[number], self.ledger.dropped[number], self._traffic.waited[number]),
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
        """Writes a last snapshot, and waits for it."""
        if self.snapshots is not None:
            self.snapshots.wait()  # for an earlier one
            self.take_snapshot()
            self.snapshots.wait()

    def _knows(self, sender: Create | Push | Pull | Put | OpenMemory | Suspend | Leave) -> bool:
        return self.incarnations.get(sender.worker) == sender.incarnation

    def _attach(self, message: Attach, answer: Answer) -> None:
        if self.incarnations.get(message.worker) != message.incarnation:
            self.incarnations[message.worker] = message.incarnation
            self.ledger.enter(message.worker, self.sequences.get((message.worker, message.incarnation), -1))
        if self._differences is not None:  # answers may be lost
            self._differences.forget(message.worker)
        counted = tuple((*source, sequence) for source, sequence in self.sequences.items()) if message.joins else ()
        answer(Attached(message.id, self.ledger.workers[message.worker].clock, self.store is not None, counted), ())

    def _create(self, message: Create, arrays: list[np.ndarray], answer: Answer) -> None:
        if self.store is None:
            try:
                self._make(message, arrays)
            except Exception as error:  # of Keras, for what the worker has sent; or a snapshot of another model
                why = str(error) if isinstance(error, TfdistError) else f"{type(error).__name__}: {error}"
                rest = IMPORT_IT if "Could not locate" in why else ""
                answer(Refused(message.id, f"the model cannot be made: {why}{rest}"), ())
                return
        answer(Done(message.id, self.ledger.version), ())
        self._answer_parked()

    def _make(self, message: Create, arrays: list[np.ndarray]) -> None:
        """Makes the store, from a snapshot or from the values; without both, it has to wait for the chief."""
        state = (
            State.of_arrays(arrays, len(message.held), message.slots, message.scalars) if message.has_values else None
        )
        found = self.snapshots.find(message.model, message.held) if self.snapshots is not None else None
        if found is not None:
            self.ledger.version = found.version
            self.ledger.counted.update(found.counted)
            self.sequences |= found.sequences
            self.applied |= found.sequences
            for worker, incarnation in self.incarnations.items():
                one = self.ledger.workers[worker]
                one.sequence = max(one.sequence, self.sequences.get((worker, incarnation), -1))
            state = State([part.value for part in found.parts], [part.slots for part in found.parts], found.scalars)
        self.model = message.model
        self.is_restored = found is not None
        if state is not None:
            self.make_store(message.held, message.optimizer, state)
            self.take_snapshot()

    def make_store(self, held: Sequence[Held], optimizer: dict[str, Any], state: State) -> None:
        """Makes the store.

        Args:
            held: describes its variables.
            optimizer: as `keras.saving.serialize_keras_object` describes it.
            state: its values, and the optimizer's variables.

        Raises:
            Exception: of Keras, for an optimizer that this process does not know.
        """
        if self.is_hogwild:
            self.store = MemoryStore(held, state, optimizer)
        else:
            self.store = Store(held, state, optimizer, self.is_lazy)
        pairs = zip(held, self.store.shapes.shapes, strict=True)
        whole = [Whole(one.path, (one.rows, *shape[1:]) if shape else ()) for one, shape in pairs]
        if self.compression is not None:
            self._unpacker = Unpacker(self.compression, whole, self.store.shapes)
        if self.pull_compression is not None:
            self._differences = Differences(self.pull_compression, whole, self.store.shapes)
        if isinstance(self.ledger.policy, DelayCompensated):
            self._compensation = DelayCompensation(self.ledger.policy, self.store.shapes)

    def take_snapshot(self) -> None:
        """Has a snapshot written, in the background, of what is applied by now."""
        if self.snapshots is None or self.store is None:
            return
        self._settle()
        state = self.store.state()
        parts = tuple(
            PartState(held.path, held.begin, held.end, held.rows, value, dict(slots))
            for held, value, slots in zip(self.store.held, state.values, state.slots, strict=True)
        )
        waiting = [(one.source[0], one.ticket) for one in self.pushed.values() if one.ticket is not None]
        of = ShardState(
            *(self.model, self.ledger.version, self.store.config, dict(state.scalars), parts),
            *(dict(self.ledger.counted), dict(self.applied), self.tickets.books(waiting)),
        )
        self.snapshots.write(of, (self.ledger.version, self.store.edition))  # values may be assigned, too

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
                self.pushed[id(counted)] = Pushed(source, message.read, gradients, message.ticket, message.parts)
            is_refused = self.tickets.settle(message, counted)
            self._update()
            if counted is not None and id(counted) in self.pushed and not self.ledger.synchronization.in_rounds:
                # The worker goes on, and its memory with it.
                waiting = self.pushed[id(counted)]
                self.pushed[id(counted)] = replace(waiting, gradients=gradients.copy())
        if message.pulls:
            self._answer_or_park(Parked(message, answer, is_refused))
        else:
            answer(Done(message.id, self.ledger.version, is_refused, self.tickets.decision(message)), ())

    def _received(self, message: Push, arrays: list[np.ndarray]) -> Gradients:
        assert self.store is not None
        if self._unpacker is None:
            return Gradients.received(message.kinds, arrays, self.store.shapes)
        return self._unpacker.received(message.kinds, arrays, message.sequence)

    def _put(self, message: Put, arrays: list[np.ndarray], answer: Answer) -> None:
        assert self.store is not None
        incarnation, last = self._puts.get(message.worker, (message.incarnation, -1))
        if incarnation == message.incarnation and message.id <= last:  # a copy: others may have made updates since
            answer(Done(message.id, self.ledger.version), ())
            return
        try:
            self.store.assign(arrays)
        except ValueError as error:
            answer(Refused(message.id, str(error)), ())
        else:
            self._assigned_at = self.ledger.version
            self._puts[message.worker] = message.incarnation, message.id
            answer(Done(message.id, self.ledger.version), ())

    def _open_memory(self, message: OpenMemory, answer: Answer) -> None:
        if not isinstance(self.store, MemoryStore):
            answer(Refused(message.id, "this server has its values for itself: not with Hogwild()"), ())
            return
        try:
            place = self.store.place_of(message.worker)
        except ValueError as error:
            answer(Refused(message.id, str(error)), ())
        else:
            answer(OpenedMemory(message.id, self.store.where, place), ())

    def _settle(self) -> None:
        """Counts what workers have done to the values themselves."""
        if isinstance(self.store, MemoryStore):
            self.store.settle(self.ledger)

    def _update(self) -> None:
        """Makes the updates that are due, and answers what may be answered then."""
        while due := self.ledger.due():
            assert self.store is not None
            pushed = [self.pushed.pop(id(one)) for one in due]
            gradients = [
                self._corrected(one) if known.staleness else one.gradients
                for one, known in zip(pushed, due, strict=True)
            ]
            self.store.update(weighted_sum(gradients, weights(due), self.store.shapes))
            self.tickets.updated(due)
            for one, known in zip(pushed, due, strict=True):
                _note(self.applied, ((*one.source, known.sequence), *one.parts))
        self._answer_parked()

    def _corrected(self, pushed: Pushed) -> Gradients:
        """Gradients as they are to be applied, if they are late."""
        if self._compensation is None:
            return pushed.gradients
        assert self.store is not None
        return self._compensation.corrected(pushed.source[0], pushed.read, pushed.gradients, self.store.vectors())

    def _answer_or_park(self, one: Parked) -> None:
        """The same message may come again; its last sender is answered."""
        mine = one.message.worker, one.message.id
        self._parked = [other for other in self._parked if (other.message.worker, other.message.id) != mine]
        if self._may_be_answered(one):
            self._answer(one)
        else:
            self._parked.append(one)
            one.answer(Waiting(one.message.id, self._awaited_by(one)), ())

    def _answer_parked(self) -> None:
        ready = [one for one in self._parked if self._may_be_answered(one)]
        if ready:
            self._parked = [one for one in self._parked if one not in ready]
            for one in ready:
                self._answer(one)

    def _may_be_answered(self, one: Parked) -> bool:
        if self.store is None:
            return False
        return isinstance(one.message, Pull) or self.ledger.may_read(one.message.worker)

    def _awaited_by(self, one: Parked) -> tuple[int, ...]:
        """The workers that a message's answer waits for; the chief gives the first values."""
        return (0,) if self.store is None else tuple(sorted(self.ledger.awaited_by(one.message.worker)))

    def _answer(self, one: Parked) -> None:
        assert self.store is not None
        message, clock = one.message, self.ledger.workers[one.message.worker].clock
        if isinstance(message, Pull):
            values, arrays = self._whole(message.id, message.what, clock)
        else:
            values, arrays = self._newer(message, clock)
        if self._compensation is not None and (isinstance(message, Push) or message.what == "values"):
            self._compensation.sent(message.worker, self.ledger.version, self.store.vectors())
        self._traffic.sent += sum(array.nbytes for array in arrays)
        self._traffic.waited[message.worker] += time.monotonic() - one.since
        if isinstance(message, Push) and message.ticket is not None:
            values = msgspec.structs.replace(values, is_refused=one.is_refused, decision=self.tickets.decision(message))
        one.answer(values, arrays)

    def _whole(self, id: int, what: What, clock: int) -> tuple[Values, list[np.ndarray]]:
        """Answers who pulls."""
        assert self.store is not None
        self._settle()
        slots: tuple[tuple[str, ...], ...] = ()
        scalars: tuple[str, ...] = ()
        if what == "averages" or (what == "final" and self.ledger.version != self._assigned_at):
            arrays = self.store.averages() or self.store.vectors()
        elif what == "state":
            state = self.store.state()
            (slots, scalars), arrays = state.names(), state.arrays()
        else:
            arrays = self.store.since().arrays()
        counts = id, self.ledger.version, self.store.iterations, clock
        return Values(*counts, slots, scalars, edition=self.store.edition), arrays

    def _newer(self, message: Push, clock: int) -> tuple[Values, list[np.ndarray]]:
        """Answers who has pushed."""
        assert self.store is not None
        self._settle()
        newer = self.store.since(message.edition, message.rows)
        kinds, arrays, copy = newer.kinds if newer.sparse else (), newer.arrays(), None
        if self._differences is not None:
            answered = self._differences.answered(message, newer)
            kinds, arrays, copy = answered.kinds, answered.arrays, answered.copy
        counts = message.id, self.ledger.version, self.store.iterations, clock
        return Values(*counts, edition=self.store.edition, kinds=kinds, copy=copy), arrays

    def read(self, message: Read) -> tuple[Values, list[np.ndarray]] | None:
        """Answers a task that takes no part in the training; None where there are no values yet.

        Args:
            message: of the task.
        """
        return None if self.store is None else self._whole(message.id, message.what, clock=0)


def _note(sequences: dict[tuple[int, int], int], pushes: Iterable[tuple[int, int, int]]) -> None:
    """Notes the last push of each worker and incarnation."""
    for worker, incarnation, sequence in pushes:
        sequences[worker, incarnation] = max(sequence, sequences.get((worker, incarnation), -1))
