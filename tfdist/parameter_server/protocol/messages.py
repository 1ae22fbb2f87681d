"""The messages between workers and parameter servers; arrays follow in frames (`wire.py`).

Every message of a worker has an ``id``, which the server's answer repeats. A worker sends a message again if no answer
comes: all of them may arrive twice.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tfdist.parameter_server.protocol.changes import Edition
from tfdist.parameter_server.protocol.dealing import (
    BeginEpoch,
    Bring,
    Brought,
    Dealt,
    LeaveEpoch,
    Merged,
    MergeMetrics,
    NoBatch,
    Planned,
    Skip,
    Take,
)
from tfdist.parameter_server.protocol.gradients import Kind
from tfdist.parameter_server.protocol.nameless import Where
from tfdist.parameter_server.protocol.report import ModelReport
from tfdist.parameter_server.protocol.state import Held
from tfdist.parameter_server.protocol.tables import (
    AssignRows,
    AttachTable,
    ExportTable,
    Lookup,
    Rows,
    TableAttached,
    UpdateRows,
)
from tfdist.parameter_server.protocol.wire import Codec, Message

# From a worker.


class Attach(Message, frozen=True):
    """A worker enters.

    Attributes:
        worker: its task's number.
        incarnation: a random number of this entry, so that a worker that comes again is not taken for the first.
        model: its name (`worker.model.Model.name`). What else comes over this connection is about it.
        occurrence: how often this worker has begun a model of this name before.
        place: how many models this worker has begun before.
        variables: of the model, described for messages.
        joins: whether it is the server of a host, which asks what it has pushed for its workers before.
        program: a random number of the process, the same for all of its models; 0 if it is the incarnation.
    """

    id: int
    worker: int
    incarnation: int
    model: str
    occurrence: int = 0
    place: int = 0
    variables: tuple[str, ...] = ()
    joins: bool = False
    program: int = 0


class Create(Message, frozen=True):
    """Describes the server's part of the model, to a server that does not have it. Only the first counts.

    If the server finds a snapshot, it goes on from there. Otherwise it needs the values, in a `State` in arrays that
    follow; the chief gives them.

    Attributes:
        worker: its task's number.
        incarnation: as of `Attach`.
        model: as of `Attach`.
        held: the server's.
        optimizer: as `keras.saving.serialize_keras_object` describes it.
        has_values: whether the arrays follow.
        slots: for each variable, the names of its slots.
        scalars: names of the optimizer's scalars.
        shapes: of what is held.
        dtypes: of what is held, by name.
    """

    id: int
    worker: int
    incarnation: int
    model: str
    held: tuple[Held, ...]
    optimizer: dict[str, Any]
    has_values: bool
    slots: tuple[tuple[str, ...], ...] = ()
    scalars: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()


class Decision(msgspec.Struct, frozen=True):
    """What the server with the dealer has made of a push with a ticket. The other servers do the same.

    If each server decided by itself, the workers' clocks and rounds could differ between servers: then one worker could
    wait on one server for another worker that waits for it on another server.

    Attributes:
        clock: the worker's, after the push; None if others do not wait for it, as it was lost meanwhile.
        scale: factor of the gradients by the staleness policy.
        round: where there are rounds, the one that the push belongs to.
        peers: the workers whose gradients made the round's update.
    """

    clock: int | None
    scale: float
    round: tuple[int, int] | None = None
    peers: tuple[int, ...] = ()


class Push(Message, frozen=True):
    """Gradients of one step, followed by their arrays (`Gradients.arrays`).

    Attributes:
        worker: its task's number.
        incarnation: as of `Attach`.
        sequence: of this push; each counts once.
        clock: the number of steps that the worker has finished.
        read: the version of the parameters that the gradients are of.
        samples: their weight where several are averaged.
        kinds: of the gradients, one for each variable; empty if all are dense.
        pulls: whether the answer is to be `Values`, when the worker may have them, instead of `Done`.
        learning_rate: the chief's; None from others, and where a schedule sets it.
        ticket: of the batch that the gradients are of, to the server with the dealer; None if nobody dealt it.
        decision: of that server, to the others.
        edition: of the values that the worker has; None if it wants whole variables.
        rows: the variables of which it takes newer rows in place of the whole.
        generation: of its copy of the values, where differences to that are sent; with another one than before it wants
            whole values.
        parts: of the server of a host, the worker, incarnation and sequence of each push that it has joined.
    """

    id: int
    worker: int
    incarnation: int
    sequence: int
    clock: int
    read: int
    samples: float
    kinds: tuple[Kind, ...] = ()
    pulls: bool = False
    learning_rate: float | None = None
    ticket: int | None = None
    decision: Decision | None = None
    edition: Edition | None = None
    rows: tuple[int, ...] = ()
    generation: int = 0
    parts: tuple[tuple[int, int, int], ...] = ()


class OpenMemory(Message, frozen=True):
    """Asks for the memory in which the values are, with `Hogwild`; the answer is `OpenedMemory`.

    Attributes:
        worker: its task's number.
        incarnation: as of `Attach`.
    """

    id: int
    worker: int
    incarnation: int


What = Literal["values", "averages", "final", "state"]
"""What a worker pulls.

The parameters; their moving averages; what the parameters are after `fit`, which is their averages unless something was
assigned since the last update; or parameters, slots and scalars (`State`).
"""


class Read(Message, frozen=True):
    """Asks for the newest model of a name, by a task that takes no part in its training; the answer is `Values`.

    Attributes:
        model: its name.
        what: as of `Pull`.
    """

    id: int
    model: str
    what: What = "values"


class Pull(Message, frozen=True):
    """Asks for the parameters as they are.

    Attributes:
        what: of them.
    """

    id: int
    worker: int
    incarnation: int
    what: What = "values"


class Put(Message, frozen=True):
    """The chief's program has assigned to variables: their vectors follow. Slots stay as they are."""

    id: int
    worker: int
    incarnation: int


class Suspend(Message, frozen=True):
    """Nobody is to wait for this worker until its next push.

    Attributes:
        is_end: whether a call of `fit` has ended, so that also others need not wait that take every step together.
    """

    id: int
    worker: int
    incarnation: int
    is_end: bool = False


class Leave(Message, frozen=True):
    """The worker needs the model no more.

    Attributes:
        is_over: whether it goes on with another optimizer for the same variables. When all have, the model is dropped.
    """

    id: int
    worker: int
    incarnation: int
    is_over: bool = False


class GiveState(Message, frozen=True):
    """Compares a model's weights that no server updates with the chief's. The chief gives its own.

    Attributes:
        worker: its task's number.
        incarnation: as of `Attach`.
        model: a digest of the variables.
        occurrence: as of `Attach`.
        place: how many sets of such weights this worker has compared before.
        variables: described for messages.
        digests: of the values.
        given: the places of the arrays that follow, which the chief's server has asked for.
    """

    id: int
    worker: int
    incarnation: int
    model: str
    occurrence: int
    place: int
    variables: tuple[str, ...]
    digests: tuple[bytes, ...]
    given: tuple[int, ...] = ()


class Share(Message, frozen=True):
    """Arrays may be in a segment (`tfdist.parameter_server.protocol.shared_memory`) from now on, over this connection.

    Attributes:
        worker: its task's number.
        where: the segment.
        area: bytes of an area.
        slots: how many there are.
    """

    id: int
    worker: int
    where: Where
    area: int
    slots: int


class Inspect(Message, frozen=True):
    """Asks for a `Report`; from anybody who has the secret."""

    id: int


# From a server.


class Attached(Message, frozen=True):
    """The worker has entered.

    Attributes:
        clock: with which it begins.
        is_created: whether the server has its part of the model.
        counted: to the server of a host, worker, incarnation and sequence of the last pushes that were counted.
    """

    id: int
    clock: int
    is_created: bool
    counted: tuple[tuple[int, int, int], ...] = ()


class Done(Message, frozen=True):
    """The message has taken effect, now or when it came first.

    Attributes:
        version: of the parameters.
        is_refused: as of `Values`.
        decision: as of `Values`.
    """

    id: int
    version: int
    is_refused: bool = False
    decision: Decision | None = None


class Values(Message, frozen=True):
    """The parameters, in arrays that follow, in the order of `Gradients.arrays`.

    Attributes:
        version: of the parameters.
        iterations: updates that the optimizer has made.
        clock: of the worker.
        slots: as of `Create`, if the state was asked for.
        scalars: as of `Create`, if the state was asked for.
        is_refused: whether the push was not applied, because its batch is dealt again; the other servers must not get
            it.
        decision: about the push, if it had a ticket.
        edition: of the parameters.
        kinds: one for each variable, "sparse" where only those rows follow that are newer than what the worker has,
            "packed" where a difference follows; empty if all are whole.
        copy: what the worker has then, where differences are sent (`differences.Copy`).
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
    """Answers `GiveState`.

    Attributes:
        places: to the chief, of the arrays that the server lacks; to others, of those that differ from the chief's,
            which follow.
        is_known: whether the server has the chief's; without them the worker keeps its own, as the chief is gone.
    """

    id: int
    places: tuple[int, ...]
    is_known: bool = True


class Waiting(Message, frozen=True):
    """The answer comes when other workers have pushed, or the chief has given values: a sign of life meanwhile.

    Attributes:
        awaited: numbers of the workers that are waited for.
    """

    id: int
    awaited: tuple[int, ...] = ()


class OpenedMemory(Message, frozen=True):
    """Where the values are (`tfdist.parameter_server.protocol.hogwild_memory.Memory`).

    Attributes:
        where: the memory.
        place: the worker's own.
    """

    id: int
    where: Where
    place: int


class Refused(Message, frozen=True):
    """The message is not taken.

    Attributes:
        is_unknown: whether the worker has to attach first: the server was started again, or took it for lost.
        is_over: whether all workers have gone on to other optimizers for the model's variables.
        newest: then, the occurrence of the model that is trained now; None if there is none.
        ended: a worker that is lost, or has ended, without what was asked for; None if that is not why.
    """

    id: int
    why: str
    is_unknown: bool = False
    is_over: bool = False
    newest: int | None = None
    ended: int | None = None


class Report(Message, frozen=True):
    """What the server is doing.

    Attributes:
        models: its shards.
        tasks: the names of all tasks, by number.
        servers: the addresses of all servers.
    """

    id: int
    models: tuple[ModelReport, ...]
    tasks: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()


_OfModels = Attach | Create | Push | Pull | Put | OpenMemory | Suspend | Leave
_OfEpochs = BeginEpoch | Bring | Take | Skip | LeaveEpoch | MergeMetrics
_OfTables = AttachTable | Lookup | UpdateRows | AssignRows | ExportTable

FROM_WORKER = Codec(_OfModels | _OfEpochs | _OfTables | GiveState | Share | Inspect | Read)
_AboutModels = Attached | Done | Values | StateDiffers | OpenedMemory | Report
_AboutEpochs = Planned | Dealt | Brought | NoBatch | Merged
_AboutTables = TableAttached | Rows
FROM_SERVER = Codec(_AboutModels | _AboutEpochs | _AboutTables | Waiting | Refused)
