"""A worker's part in training one model on parameter servers: what it pushes where, and what it gets back."""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.errors import TfdistError
from tfdist.parameter_server.client import Connection, RefusedError, Request
from tfdist.parameter_server.gradients import Gradients
from tfdist.parameter_server.messages import Attach, Create, Leave, Pull, Push, Suspend, What
from tfdist.parameter_server.model import Model
from tfdist.parameter_server.state import Held, State
from tfdist.parameter_server.wire import Message

log = logging.getLogger("tfdist")

_LEAVE_SECONDS = 2.0

Vectors = list[list[np.ndarray]]
"""By server, the vectors of its parts."""


class Session:
    """The connections to all servers, for one model. For one thread at a time.

    A server that was started again, or took this worker for lost, is attached to again, and the message is repeated:
    the server counts a push that it has had before once.

    Args:
        connections: to each server, in the order of the cluster.
        worker: this task's number.
        model: the variables.
        number: how many sessions this worker has begun before.

    Attributes:
        pushes: the number of steps that this worker has pushed.
        iterations: updates that the optimizer had made when this worker last read.
        is_suspended: whether others do not wait for this worker.
    """

    def __init__(self, connections: Sequence[Connection], worker: int, model: Model, number: int = 0) -> None:
        self._connections = connections
        self._worker = worker
        self._incarnation = secrets.randbits(63)
        self._model = model
        self._number = number
        self._described: tuple[Sequence[Held], dict[str, Any]] = ((), {})
        self._values: Callable[[], State] | None = None
        self._versions = [0] * len(connections)
        self.pushes = 0
        self._rate: float | None = None
        self._clocks = [0] * len(connections)
        self.iterations = 0
        self.is_suspended = True

    @property
    def version(self) -> int:
        """The number of updates that the parameters contain; of the server that has least."""
        return min(self._versions)

    def begin(self, held: Sequence[Held], optimizer: dict[str, Any], values: Callable[[], State] | None) -> Vectors:
        """Attaches to all servers, and waits for the model.

        Args:
            held: describes each whole variable.
            optimizer: as `keras.saving.serialize_keras_object` describes it.
            values: yields the model's state as this worker has it, for servers that do not have the model and find no
                snapshot; of the chief, else None.

        Returns:
            The variables' values.

        Raises:
            RefusedError: the servers hold another model.
            PeerLostError: a server cannot be reached.
        """
        self._described, self._values = (held, optimizer), values
        for server in range(len(self._connections)):
            self._attach(server)
        return self.pull()

    def step(self, gradients: Sequence[Gradients], samples: float = 1.0, rate: float | None = None) -> Vectors:
        """Pushes the gradients of one step, and gets the variables for the next one.

        Args:
            gradients: by server, of its parts.
            samples: their weight where several workers' are averaged.
            rate: the chief's learning rate; None on others.

        Returns:
            The variables' values, when this worker may have them.

        Raises:
            RefusedError: a server does not take them.
            PeerLostError: a server cannot be reached.
        """
        changed = rate if rate != self._rate and self._rate is not None else None
        self._rate = rate

        def push(server: int, id: int) -> Message:
            own = gradients[server]
            is_dense = all(kind == "dense" for kind in own.kinds)
            return Push(
                *(
                    id,
                    self._worker,
                    self._incarnation,
                    self.pushes,
                    self._clocks[server],
                    self._versions[server],
                    samples,
                ),
                *(() if is_dense else own.kinds, True, changed),
            )

        vectors = self._ask(push, [own.arrays() for own in gradients])
        self.pushes += 1
        self.is_suspended = False
        return vectors

    def pull(self) -> Vectors:
        """The variables' values as they are now."""
        return self._ask(self._pulling("values"))

    def averages(self) -> list[np.ndarray]:
        """The moving averages of the variables, by the optimizer; the values if it keeps none."""
        return self.whole(self._ask(self._pulling("averages")))

    def state(self) -> State:
        """Values, slots and scalars of the whole model."""
        answers = self._answers(self._pulling("state"))
        counts = [len(shard) for shard in self._model.dealing.shards]
        states = [
            State.of_arrays(arrays, count, answer.slots, answer.scalars)
            for (answer, arrays), count in zip(answers, counts, strict=True)
        ]
        values = self._model.whole([state.values for state in states])
        slots: list[dict[str, np.ndarray]] = [{} for _ in values]
        for name in dict.fromkeys(name for state in states for own in state.slots for name in own):
            missing = np.empty(0)
            found = self._model.whole([[own.get(name, missing) for own in state.slots] for state in states])
            for own, array, value in zip(slots, found, values, strict=True):
                if array.shape == value.shape:
                    own[name] = array
        return State(values, slots, max((state.scalars for state in states), key=lambda one: int(one["iteration"])))

    def whole(self, vectors: Vectors) -> list[np.ndarray]:
        """The variables' arrays, from vectors of their parts."""
        layouts = [shapes.layout() for shapes in self._model.shapes]
        return self._model.whole(
            [list(layout.arrays(own).values()) for layout, own in zip(layouts, vectors, strict=True)]
        )

    def suspend(self) -> None:
        """Nobody is to wait for this worker until its next step."""
        if not self.is_suspended:
            self._answers(lambda server, id: Suspend(id, self._worker, self._incarnation))
            self.is_suspended = True

    def close(self) -> None:
        """Leaves all servers. One that does not answer learns from the rendezvous that this worker has ended."""
        for connection in self._connections:
            with contextlib.suppress(TfdistError):
                connection.request(lambda id: Leave(id, self._worker, self._incarnation), timeout=_LEAVE_SECONDS)
            connection.close()

    def _attach(self, server: int) -> None:
        connection, digest = self._connections[server], self._model.dealt_digest
        answer, _ = connection.request(lambda id: Attach(id, self._worker, self._incarnation, digest, self._number))
        self._clocks[server] = answer.clock
        if answer.is_created:
            return
        described, optimizer = self._described
        held = self._model.held(server, described)
        part = State([]) if self._values is None else self._model.part_of(server, self._values())
        slots, scalars = part.names()

        def create(id: int) -> Message:
            sender = id, self._worker, self._incarnation
            return Create(*sender, self._model.digest, held, optimizer, self._values is not None, slots, scalars)

        connection.request(create, part.arrays())

    def _pulling(self, what: What) -> Callable[[int, int], Message]:
        return lambda server, id: Pull(id, self._worker, self._incarnation, what)

    def _ask(
        self, make: Callable[[int, int], Message], arrays: Sequence[Sequence[np.ndarray]] | None = None
    ) -> Vectors:
        """The vectors that all servers answer to a message with; notes how new they are."""
        answers = self._answers(make, arrays)
        versions = [answer.version for answer, _ in answers]
        for server, (before, now) in enumerate(zip(self._versions, versions, strict=True)):
            if now < before:
                log.warning("tfdist: ps %d was started again: at least %d updates are lost.", server, before - now)
        self._versions = versions
        self.iterations = min(answer.iterations for answer, _ in answers)
        self._clocks = [answer.clock for answer, _ in answers]
        return [vectors for _, vectors in answers]

    def _answers(
        self, make: Callable[[int, int], Message], arrays: Sequence[Sequence[np.ndarray]] | None = None
    ) -> list[tuple[Any, list[np.ndarray]]]:
        """Sends a message to each server, and then waits for the answers."""
        given = arrays or [()] * len(self._connections)

        def send(server: int) -> Request:
            return self._connections[server].send(lambda id: make(server, id), given[server])

        def receive(server: int, request: Request) -> tuple[Any, list[np.ndarray]]:
            while True:
                try:
                    return self._connections[server].receive(request)
                except RefusedError as error:
                    if not error.is_unknown:
                        raise
                self._attach(server)
                request = send(server)

        requests = [send(server) for server in range(len(self._connections))]
        return [receive(server, request) for server, request in enumerate(requests)]
