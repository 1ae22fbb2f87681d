"""The messages between workers and parameter servers; arrays follow in frames (`wire.py`).

Every message of a worker has an ``id``, which the server's answer repeats. A worker sends a message again if no answer
comes, so each message may arrive twice.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tfdist.parameter_server.protocol.anonymous_memory import MemoryLocation
from tfdist.parameter_server.protocol.changes import Edition
from tfdist.parameter_server.protocol.dealing import (
    BeginEpoch,
    BringBatch,
    DealtBatch,
    EpochPlanned,
    LeaveEpoch,
    MergedMetrics,
    MergeMetrics,
    NoBatch,
    RoomForBatch,
    SkipBatch,
    TakeBatch,
)
from tfdist.parameter_server.protocol.gradients import Kind
from tfdist.parameter_server.protocol.report import ModelReport
from tfdist.parameter_server.protocol.state import HeldRows
from tfdist.parameter_server.protocol.tables import (
    AssignRows,
    AttachTable,
    ExportTable,
    Lookup,
    Rows,
    TableAttached,
    UpdateRows,
)
from tfdist.parameter_server.protocol.wire import Codec, Message, WorkerMessage

# From a worker.


class Attach(WorkerMessage, frozen=True):
    """Says that a worker takes part in training a model; `Attached` answers.

    Attributes:
        model: name of the model (`worker.model.Model.name`). Later messages over this connection are about it.
        occurrence: number of models of this name that this worker has begun before.
        place: number of models that this worker has begun before.
        variables: text with path, shape and dtype of each of the model's variables.
        joins: whether the sender is the server of a host, which asks what it has pushed for its workers before.
        program: random number of the process, the same for all of its models; 0 if ``incarnation`` is that number.
        options: text with name and value of each of the optimizer's options that must be the same on all workers.
    """

    model: str
    occurrence: int = 0
    place: int = 0
    variables: tuple[str, ...] = ()
    joins: bool = False
    program: int = 0
    options: tuple[str, ...] = ()


class CreateShard(WorkerMessage, frozen=True):
    """Describes the server's part of the model, to a server that does not have it. Only the first description counts.

    If the server finds a snapshot, it continues from there. Otherwise it needs a `TrainingState`, whose arrays follow
    in the chief's message.

    Attributes:
        model: name of the model.
        held: rows of variables that the server holds.
        optimizer: the optimizer, as `keras.saving.serialize_keras_object` describes it.
        has_values: whether the arrays follow.
        slots: for each variable, the names of its slots.
        scalars: names of the optimizer's scalars.
        shapes: shapes of the rows in ``held``.
        dtypes: names of the dtypes of the rows in ``held``.
    """

    model: str
    held: tuple[HeldRows, ...]
    optimizer: dict[str, Any]
    has_values: bool
    slots: tuple[tuple[str, ...], ...] = ()
    scalars: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """How the server with the dealer has counted a push with a ticket. The other servers count it in the same way.

    If each server decided by itself, the workers' clocks and rounds could differ between servers. Then two workers
    could wait for each other on different servers.

    Attributes:
        clock: clock of the worker after the push; None if others do not wait for it, because it was lost meanwhile.
        scale: factor of the gradients, from the staleness policy.
        round: round that the push belongs to; None without rounds.
        peers: numbers of the workers whose gradients made the round's update.
    """

    clock: int | None
    scale: float
    round: tuple[int, int] | None = None
    peers: tuple[int, ...] = ()


class WorkerValues(msgspec.Struct, frozen=True):
    """What a worker has of the parameters, so that a server sends only what is newer.

    Attributes:
        edition: edition of the values; None asks for whole variables.
        rows: variables of which the worker takes newer rows in place of the whole.
        generation: generation of the worker's copy, where differences are sent; a new one asks for whole values.
    """

    edition: Edition | None = None
    rows: tuple[int, ...] = ()
    generation: int = 0


class Push(WorkerMessage, frozen=True):
    """Gradients of one step, followed by their arrays (`Gradients.arrays`); `Values` answers when the worker may read.

    Attributes:
        sequence: number of this push; a push that arrives twice counts once.
        clock: number of steps that the worker has finished.
        read: version of the parameters that the gradients were computed at.
        samples: weight of the gradients where several pushes are averaged.
        kinds: kind of each variable's gradient; empty if all are dense.
        learning_rate: the chief's learning rate; None from other workers, and where a schedule sets it.
        dealt: for the server with the dealer, the ticket of the batch; for the other servers, that server's decision;
            None if no dealer is used.
        has: what the worker has of the parameters.
        parts: from the server of a host, the worker, incarnation and sequence of each push that is part of this one.
    """

    sequence: int
    clock: int
    read: int
    samples: float
    kinds: tuple[Kind, ...] = ()
    learning_rate: float | None = None
    dealt: int | Decision | None = None
    has: WorkerValues = WorkerValues()
    parts: tuple[tuple[int, int, int], ...] = ()

    @property
    def ticket(self) -> int | None:
        """Ticket of the batch, for the server with the dealer; None for other servers, and if no dealer is used."""
        return self.dealt if isinstance(self.dealt, int) else None


class OpenMemory(WorkerMessage, frozen=True):
    """Asks for the memory that the values are in, with `Hogwild`; `OpenedMemory` answers."""


PullKind = Literal["values", "averages", "final", "state"]
"""What a worker pulls.

"values" are the parameters, and "averages" their moving averages. "final" is what the parameters are after `fit`: their
averages, unless something was assigned since the last update. "state" has parameters, slots and scalars
(`TrainingState`).
"""


class ReadModel(Message, frozen=True):
    """Asks for the newest model of a name, for a task that takes no part in its training; `Values` answers.

    Attributes:
        model: name of the model.
        what: what the answer contains.
    """

    id: int
    model: str
    what: PullKind = "values"


class Pull(WorkerMessage, frozen=True):
    """Asks for the current parameters; `Values` answers.

    Attributes:
        what: what the answer contains.
    """

    what: PullKind = "values"


class AssignValues(WorkerMessage, frozen=True):
    """Assigns to the variables what the chief's program has assigned: their vectors follow. Slots do not change."""


class Suspend(WorkerMessage, frozen=True):
    """Says that nobody needs to wait for this worker until its next push.

    Attributes:
        is_end: whether a call of `fit` has ended. Only then do workers that take every step together stop waiting.
    """

    is_end: bool = False


class LeaveModel(WorkerMessage, frozen=True):
    """Says that the worker no longer takes part in training the model.

    Attributes:
        is_over: whether the worker goes on with another optimizer for the same variables. When the chief has gone on
            and all workers have left, the server drops the model.
    """

    is_over: bool = False


class CompareState(WorkerMessage, frozen=True):
    """Compares a model's weights that no server updates with the chief's; the chief gives its own.

    Attributes:
        incarnation: random number of the worker's process.
        model: digest of the variables' descriptions.
        occurrence: number of sets of weights with this digest that this worker has compared before.
        place: number of sets of weights that this worker has compared before.
        variables: text with path, shape and dtype of each variable.
        digests: digest of each variable's value.
        given: places of the arrays that follow, which the server has asked the chief for.
    """

    model: str
    occurrence: int
    place: int
    variables: tuple[str, ...]
    digests: tuple[bytes, ...]
    given: tuple[int, ...] = ()


class OfferSegment(Message, frozen=True):
    """Offers a segment for the arrays of this connection (`tfdist.parameter_server.protocol.shared_memory`).

    Attributes:
        worker: number of the worker's task.
        where: location of the segment.
        area: bytes of each area.
        slots: number of slots.
    """

    id: int
    worker: int
    where: MemoryLocation
    area: int
    slots: int


class Inspect(Message, frozen=True):
    """Asks for a `ServerReport`; any process that has the secret may send it."""

    id: int


# From a server.


class Attached(Message, frozen=True):
    """Confirms that the worker takes part in training the model.

    Attributes:
        clock: clock that the worker begins with.
        is_created: whether the server has its part of the model.
        counted: for the server of a host, worker, incarnation and sequence of the last pushes that were counted.
    """

    id: int
    clock: int
    is_created: bool
    counted: tuple[tuple[int, int, int], ...] = ()


class Done(Message, frozen=True):
    """Confirms that the message has taken effect, now or when it first came.

    Attributes:
        version: version of the parameters.
    """

    id: int
    version: int


class Values(Message, frozen=True):
    """The parameters, in arrays that follow, in the order of `Gradients.arrays`.

    Attributes:
        version: version of the parameters.
        iterations: number of updates that the optimizer has made.
        clock: clock of the worker.
        slots: for each variable, the names of its slots, if the state was asked for.
        scalars: names of the optimizer's scalars, if the state was asked for.
        is_refused: whether the push was not applied, because its batch is dealt again. Then the other servers must not
            get it.
        decision: decision about the push, if it had a ticket.
        edition: edition of the parameters.
        kinds: kind of each variable's values: "sparse" where only rows follow that are newer than the worker's,
            "packed" where a difference follows; empty if all are whole.
        copy: state of the worker's copy after this answer, where differences are sent (`differences.Copy`).
    """

    id: int
    version: int
    iterations: int
    clock: int
    slots: tuple[tuple[str, ...], ...] = ()
    scalars: tuple[str, ...] = ()
    is_refused: bool = False
    decision: Decision | None = None
    edition: Edition | None = None
    kinds: tuple[Kind, ...] = ()
    copy: tuple[int, int, int] | None = None


class StateDiffers(Message, frozen=True):
    """Answers `CompareState` with the arrays that differ.

    Attributes:
        places: for the chief, places of the arrays that the server lacks; for others, places of the arrays that differ
            from the chief's, which follow.
        is_known: whether the server has the chief's arrays. If not, the chief is gone, and the worker keeps its own.
    """

    id: int
    places: tuple[int, ...]
    is_known: bool = True


class Waiting(Message, frozen=True):
    """A sign of life: the answer has to wait until other workers have pushed, or the chief has given values.

    Attributes:
        awaited: numbers of the workers that the answer waits for.
    """

    id: int
    awaited: tuple[int, ...] = ()


class OpenedMemory(Message, frozen=True):
    """Says where the values are (`tfdist.parameter_server.protocol.hogwild_memory.Memory`).

    Attributes:
        where: location of the memory.
        place: number of the worker's place in it.
    """

    id: int
    where: MemoryLocation
    place: int


class Refused(Message, frozen=True):
    """Says that the server refuses a message.

    Attributes:
        why: reason, for people to read.
        is_unknown: whether the worker has to attach first: the server was started again, or took the worker for lost.
        is_over: whether all workers have gone on to other optimizers for the model's variables.
        newest: with ``is_over``, the occurrence of the model that is trained now; None if there is none.
        ended: number of a worker that was lost or has ended before it gave its part; None for other reasons.
    """

    id: int
    why: str
    is_unknown: bool = False
    is_over: bool = False
    newest: int | None = None
    ended: int | None = None


class ServerReport(Message, frozen=True):
    """Reports what the server is doing.

    Attributes:
        models: report of each shard.
        tasks: names of all tasks, by number.
        servers: addresses of all servers.
    """

    id: int
    models: tuple[ModelReport, ...]
    tasks: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()


_OfModels = Attach | CreateShard | Push | Pull | AssignValues | OpenMemory | Suspend | LeaveModel
_OfEpochs = BeginEpoch | BringBatch | TakeBatch | SkipBatch | LeaveEpoch | MergeMetrics
_OfTables = AttachTable | Lookup | UpdateRows | AssignRows | ExportTable

FROM_WORKER = Codec(_OfModels | _OfEpochs | _OfTables | CompareState | OfferSegment | Inspect | ReadModel)
_AboutModels = Attached | Done | Values | StateDiffers | OpenedMemory | ServerReport
_AboutEpochs = EpochPlanned | DealtBatch | RoomForBatch | NoBatch | MergedMetrics
_AboutTables = TableAttached | Rows
FROM_SERVER = Codec(_AboutModels | _AboutEpochs | _AboutTables | Waiting | Refused)
