"""The messages between workers and parameter servers; arrays follow in frames (`tfdist.parameter_server.wire`).

Every message of a worker has an ``id``, which the server's answer repeats. A worker sends a message again if no answer
comes: all of them may arrive twice.
"""

from __future__ import annotations

from typing import Any, Literal

from tfdist.parameter_server.gradients import Kind
from tfdist.parameter_server.state import Held
from tfdist.parameter_server.wire import Codec, Message

# From a worker.


class Attach(Message, frozen=True):
    """A worker enters.

    Attributes:
        worker: its task's number.
        incarnation: a random number of this process, so that a worker that comes again is not taken for the first.
        digest: of the model's variables and the way they are dealt; the same on every worker.
        model: how many models this worker has attached for before; the workers of a job attach in the same order. What
            else comes over this connection is about this one.
    """

    id: int
    worker: int
    incarnation: int
    digest: str
    model: int = 0


class Create(Message, frozen=True):
    """Describes the server's part of the model, to a server that does not have it. Only the first counts.

    If the server finds a snapshot, it goes on from there. Otherwise it needs the values, in a `State` in arrays that
    follow; the chief gives them.

    Attributes:
        worker: its task's number.
        incarnation: as of `Attach`.
        digest: of the model's variables.
        held: the server's.
        optimizer: as `keras.saving.serialize_keras_object` describes it.
        has_values: whether the arrays follow.
        slots: for each variable, the names of its slots.
        scalars: names of the optimizer's scalars.
    """

    id: int
    worker: int
    incarnation: int
    digest: str
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
    """Nobody is to wait for this worker until its next push."""

    id: int
    worker: int
    incarnation: int


class Leave(Message, frozen=True):
    """The worker needs the server no more."""

    id: int
    worker: int
    incarnation: int


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
    """The answer to a `Push` that pulls comes when other workers have pushed: a sign of life meanwhile."""

    id: int


class Refused(Message, frozen=True):
    """The message is not taken.

    Attributes:
        is_unknown: whether the worker has to attach first: the server was started again, or took it for lost.
    """

    id: int
    why: str
    is_unknown: bool = False


FROM_WORKER = Codec(Attach | Create | Push | Pull | Put | Suspend | Leave)
FROM_SERVER = Codec(Attached | Done | Values | Waiting | Refused)
