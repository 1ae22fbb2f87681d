"""The messages between workers and parameter servers; arrays follow in frames (`tfdist.parameter_server.wire`).

Every message of a worker has an ``id``, which the server's answer repeats. A worker sends a message again if no answer
comes: all of them may arrive twice.
"""

from __future__ import annotations

from typing import Any, Literal

from tfdist.parameter_server.gradients import Kind
from tfdist.parameter_server.report import ModelReport
from tfdist.parameter_server.state import Held
from tfdist.parameter_server.table_messages import (
    AssignRows,
    AttachTable,
    ExportTable,
    Lookup,
    Rows,
    TableAttached,
    UpdateRows,
)
from tfdist.parameter_server.wire import Codec, Message

# From a worker.


class Attach(Message, frozen=True):
    """A worker enters.

    Attributes:
        worker: its task's number.
        incarnation: a random number of this process, so that a worker that comes again is not taken for the first.
        model: its name (`tfdist.parameter_server.model.Model.name`). What else comes over this connection is about it.
        occurrence: how often this worker has begun a model of this name before.
        place: how many models this worker has begun before.
        variables: of the model, described for messages.
    """

    id: int
    worker: int
    incarnation: int
    model: str
    occurrence: int = 0
    place: int = 0
    variables: tuple[str, ...] = ()


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


What = Literal["values", "averages", "state"]
"""What a worker pulls: the parameters; their moving averages; or parameters, slots and scalars (`State`)."""


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


class Share(Message, frozen=True):
    """Arrays may be in a segment (`tfdist.parameter_server.shared_memory`) from now on, over this connection.

    Attributes:
        worker: its task's number.
        name: of the segment.
        area: bytes of an area.
        slots: how many there are.
    """

    id: int
    worker: int
    name: str
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
    """

    id: int
    clock: int
    is_created: bool


class Done(Message, frozen=True):
    """The message has taken effect, now or when it came first.

    Attributes:
        version: of the parameters.
    """

    id: int
    version: int


class Values(Message, frozen=True):
    """The parameters, in arrays that follow.

    Attributes:
        version: of the parameters.
        iterations: updates that the optimizer has made.
        clock: of the worker.
        slots: as of `Create`, if the state was asked for.
        scalars: as of `Create`, if the state was asked for.
    """

    id: int
    version: int
    iterations: int
    clock: int
    slots: tuple[tuple[str, ...], ...] = ()
    scalars: tuple[str, ...] = ()


class Waiting(Message, frozen=True):
    """The answer comes when other workers have pushed, or the chief has given values: a sign of life meanwhile.

    Attributes:
        awaited: numbers of the workers that are waited for.
    """

    id: int
    awaited: tuple[int, ...] = ()


class Refused(Message, frozen=True):
    """The message is not taken.

    Attributes:
        is_unknown: whether the worker has to attach first: the server was started again, or took it for lost.
        is_over: whether all workers have gone on to other optimizers for the model's variables.
        newest: then, the occurrence of the model that is trained now; None if there is none.
    """

    id: int
    why: str
    is_unknown: bool = False
    is_over: bool = False
    newest: int | None = None


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


_OfModels = Attach | Create | Push | Pull | Put | Suspend | Leave
_OfTables = AttachTable | Lookup | UpdateRows | AssignRows | ExportTable

FROM_WORKER = Codec(_OfModels | _OfTables | Share | Inspect)
FROM_SERVER = Codec(Attached | Done | Values | Waiting | Refused | TableAttached | Rows | Report)
