"""The messages between workers and parameter servers; arrays follow in frames (`tfdist.parameter_server.wire`).

Every message of a worker has an ``id``, which the server's answer repeats. A worker sends a message again if no answer
comes: all of them may arrive twice.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from tfdist.parameter_server.wire import Codec, Message

Kind = Literal["none", "dense", "sparse"]
"""What a gradient is: absent, without an array; an array; or an array of rows and one of their indices."""

Gradient = np.ndarray | tuple[np.ndarray, np.ndarray] | None
"""A gradient: an array, rows with their indices, or nothing."""


class Held(msgspec.Struct, frozen=True):
    """Rows of a variable that a server holds.

    Attributes:
        path: of the variable, as Keras names it.
        begin: first row.
        end: row behind the last one.
    """

    path: str
    begin: int
    end: int


# From a worker.


class Attach(Message, frozen=True):
    """A worker enters.

    Attributes:
        worker: its task's number.
        incarnation: a random number of this process, so that a worker that comes again is not taken for the first.
        digest: of the model's variables and the way they are dealt; the same on every worker.
    """

    id: int
    worker: int
    incarnation: int
    digest: str


class Create(Message, frozen=True):
    """The chief gives the server its part of the model, followed by an array for each variable. Only the first counts.

    Attributes:
        digest: as of `Attach`.
        held: the variables.
        optimizer: as `keras.optimizers.serialize` describes it.
    """

    id: int
    digest: str
    held: tuple[Held, ...]
    optimizer: dict[str, Any]


class Push(Message, frozen=True):
    """Gradients of one step, followed by their arrays, in the order of the variables.

    Attributes:
        worker: its task's number.
        incarnation: as of `Attach`.
        sequence: of this push; each counts once.
        clock: the number of steps that the worker has finished.
        read: the version of the parameters that the gradients are of.
        samples: their weight where several are averaged.
        kinds: of the gradients.
    """

    id: int
    worker: int
    incarnation: int
    sequence: int
    clock: int
    read: int
    samples: float
    kinds: tuple[Kind, ...]


class Pull(Message, frozen=True):
    """Asks for the parameters, which a worker at this clock may have to wait for."""

    id: int
    worker: int
    incarnation: int
    clock: int


class SetLearningRate(Message, frozen=True):
    """The chief's learning rate has changed."""

    id: int
    value: float


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
    """

    id: int
    version: int
    iterations: int


class Waiting(Message, frozen=True):
    """The answer to a `Pull` comes when other workers have pushed: a sign of life meanwhile."""

    id: int


class Refused(Message, frozen=True):
    """The message is not taken.

    Attributes:
        is_unknown: whether the worker has to attach first: the server was started again, or took it for lost.
    """

    id: int
    why: str
    is_unknown: bool = False


FROM_WORKER = Codec(Attach | Create | Push | Pull | SetLearningRate | Leave)
FROM_SERVER = Codec(Attached | Done | Values | Waiting | Refused)
