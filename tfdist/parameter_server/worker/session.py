"""A worker's session with all parameter servers for one model: it pushes gradients, and gets values back."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdist.compression.policy import Policy
from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.messages import (
    AssignValues,
    Attach,
    CreateShard,
    Decision,
    Inspect,
    LeaveModel,
    OpenedMemory,
    OpenMemory,
    Pull,
    PullKind,
    Push,
    Suspend,
)
from tfdist.parameter_server.protocol.packing import Packed
from tfdist.parameter_server.protocol.report import ModelReport, merge_reports
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.protocol.wire import Message
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError, Request
from tfdist.parameter_server.worker.model import Model

log = logging.getLogger("tfdist")

_LEAVE_SECONDS = 2.0

Vectors = list[list[np.ndarray]]
"""By server, the vectors of its parts, then rows and indices of sparse ones."""


class Session:
    """The requests of a worker to all servers, for one model. For one thread at a time.

    If a server was started again, or took this worker for lost, the worker attaches again and repeats the message. The
    server counts a repeated push once.

    Args:
        connections: connection to each server, in the order of the cluster.
        worker: number of this task.
        model: variables to train.
        begun: names of the models that this worker has begun before.
        prefetch: number of steps that may be under way while the next one is computed. Values lack as many pushes of
            this worker.
        pull_compression: compression of the parameters, as the servers have it; None for no compression.
        joins: whether this is the server of a host, which pushes for its workers.
        program: random number of this process; 0 takes the session's own number.

    Attributes:
        pushes: number of steps that this worker has pushed.
        refusals: number of pushes that were not applied, because their batches were dealt to other workers.
        iterations: number of updates that the optimizer had made when this worker last read.
        is_suspended: whether no other worker waits for this one.
        counted: on the server of a host, by worker and incarnation, the sequence of the last push that was counted.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        worker: int,
        model: Model,
        begun: Sequence[str] = (),
        prefetch: int = 0,
        pull_compression: Policy | None = None,
        joins: bool = False,
        program: int = 0,
    ) -> None:
        self._program = program
        self._connections = connections
        self._worker = worker
        self._incarnation = secrets.randbits(63)
        self._model = model
        self._place = len(begun)
        self._occurrence = list(begun).count(model.name)
        self._prefetch = prefetch
        self._under_way: list[Callable[[], None]] = []
        self._unanswered: list[list[_PendingMessage]] = [[] for _ in connections]
        self._replicas = model.replicas(pull_compression)
        self._described: tuple[Sequence[HeldRows], dict[str, Any]] = ((), {})
        self._values: Callable[[], TrainingState] | None = None
        self._versions = [0] * len(connections)
        self.pushes = 0
        self.refusals = 0
        self._has_tickets = False
        self._clocks = [0] * len(connections)
        self.iterations = 0
        self.is_suspended = True
        self._joins = joins
        self.counted: dict[tuple[int, int], int] = {}

    @property
    def version(self) -> int:
        """Number of updates that the parameters contain, on the server with the fewest."""
        return min(self._versions)

    def begin(
        self,
        held: Sequence[HeldRows],
        optimizer: dict[str, Any],
        values: Callable[[], TrainingState] | None,
        follows: bool = True,
    ) -> Vectors:
        """Attaches to all servers, and waits for the model.

        Args:
            held: description of each whole variable.
            optimizer: the optimizer, as `keras.saving.serialize_keras_object` describes it.
            values: function that returns the first state of the model, for servers that do not have the model and find
                no snapshot; None on workers other than the chief.
            follows: whether to go on to the model that all others have gone on to.

        Returns:
            The variables' values.

        Raises:
            MessageRefusedError: the chief trains another model, or all have finished training this one.
            PeerLostError: a server cannot be reached.
        """
        self._described, self._values = (held, optimizer), values
        while True:
            try:
                for server in range(len(self._connections)):
                    self._attach(server)
                return self.pull()
            except MessageRefusedError as error:
                if error.refused.newest is None or not follows:
                    raise
                self._occurrence = error.refused.newest

    def step(
        self,
        gradients: Sequence[PushedGradients | Packed],
        samples: float = 1.0,
        rate: float | None = None,
        ticket: int | None = None,
        read: int | None = None,
        parts: tuple[tuple[int, int, int], ...] = (),
    ) -> Vectors:
        """Pushes the gradients of one step, and gets the variables for the next one.

        With a ticket, the push goes first to the first server, which has the dealer. If this server refuses it, because
        the batch was dealt to another worker, the gradients are dropped. Else the other servers get the push with its
        decision.

        Args:
            gradients: by server, gradients of its parts.
            samples: weight of the gradients where several workers' gradients are averaged.
            rate: the chief's learning rate; None on other workers.
            ticket: ticket of the batch, if it was dealt (`tfdist.parameter_server.dealing.dealer`).
            read: version of the parameters that the gradients were computed at; by default the last one returned.
            parts: worker, incarnation and sequence of each push that the server of a host has joined.

        Returns:
            The variables' values, when this worker may have them; with ``prefetch``, those after an earlier step. In
            place of a variable with a sparse gradient, the rows that have changed since the last step and their
            indices follow behind the server's vectors.

        Raises:
            MessageRefusedError: a server refuses the push.
            PeerLostError: a server cannot be reached.
        """

        places = [[place for place, kind in enumerate(pushed.kinds) if kind == "sparse"] for pushed in gradients]
        for replica, sparse_places in zip(self._replicas, places, strict=True):
            replica.keep(sparse_places)
        sequence, versions = self.pushes, [version if read is None else read for version in self._versions]

        decided: list[Decision | None] = []

        def push(server: int, id: int) -> Message:  # called again after attaching again, which gives another clock
            kinds = gradients[server].kinds
            return Push(
                id,
                self._worker,
                self._incarnation,
                sequence,
                self._clocks[server],
                versions[server],
                samples,
                kinds=() if all(kind == "dense" for kind in kinds) else kinds,
                pulls=True,
                learning_rate=rate,
                dealt=(decided[0] if decided else None) if server else ticket,
                has=self._replicas[server].has,
                parts=parts,
            )

        self._under_way.append(
            self._pushed(push, [pushed.arrays() for pushed in gradients], ticket is not None, decided)
        )
        self.pushes += 1
        self._has_tickets = self._has_tickets or ticket is not None
        self.is_suspended = False
        while len(self._under_way) > self._prefetch:
            self._under_way.pop(0)()
        return [replica.take(sparse_places) for replica, sparse_places in zip(self._replicas, places, strict=True)]

    def _pushed(
        self,
        push: Callable[[int, int], Message],
        arrays: Sequence[Sequence[np.ndarray]],
        has_ticket: bool,
        decided: list[Decision | None],
    ) -> Callable[[], None]:
        """Sends a push; with a ticket, to the first server only, which decides.

        Returns:
            Function that waits for the servers' answers, and queues their values.
        """
        if not has_ticket:
            receive = self._sent(push, arrays)
            return lambda: self._received(receive())
        first = self._sent(push, arrays, range(1))
        others = range(1, len(self._connections))

        def wait() -> None:
            answered = first()
            ((answer, _),) = answered
            decided.append(answer.decision)
            self.refusals += answer.is_refused
            rest = (
                self._sent(self._pulling("values"), servers=others)
                if answer.is_refused
                else self._sent(push, arrays, others)
            )
            self._received([*answered, *rest()])

        return wait

    def pull(self) -> Vectors:
        """Pulls the variables' current values."""
        self._received(self._answers(self._pulling("values")))
        return [replica.take() for replica in self._replicas]

    def values(self) -> list[np.ndarray]:
        """Returns the variables' arrays as they were returned last, as a whole or by rows."""
        return self._model.whole([replica.values() for replica in self._replicas])

    def forget(self) -> None:
        """Makes the next step return whole variables, because other values were assigned to them."""
        for replica in self._replicas:
            replica.forget()

    def put(self, arrays: Sequence[np.ndarray]) -> None:
        """Assigns to the variables on the servers.

        Args:
            arrays: new value of each variable.
        """
        self._finish()
        parts = [self._model.part_of(server, TrainingState(arrays)).values for server in range(len(self._connections))]
        vectors = [shapes.layout().vectors(part) for shapes, part in zip(self._model.shapes, parts, strict=True)]
        self._sent(lambda server, id: AssignValues(id, self._worker, self._incarnation), vectors)()

    def averages(self) -> list[np.ndarray]:
        """Returns the optimizer's moving averages of the variables; the values if it keeps none."""
        return self.whole(self._noted(self._answers(self._pulling("averages"))))

    def final(self) -> list[np.ndarray]:
        """Returns what the variables are after `fit`: `averages`, unless a program has assigned to them since."""
        return self.whole(self._noted(self._answers(self._pulling("final"))))

    def state(self) -> TrainingState:
        """Returns values, slots and scalars of the whole model."""
        answers = self._answers(self._pulling("state"))
        counts = [len(shard) for shard in self._model.dealing.shards]
        states = [
            TrainingState.of_arrays(arrays, count, answer.slots, answer.scalars)
            for (answer, arrays), count in zip(answers, counts, strict=True)
        ]
        for replica, shapes, (answer, _), state in zip(
            self._replicas, self._model.shapes, answers, states, strict=True
        ):
            replica.receive(answer.edition, (), shapes.layout().vectors(state.values))
            replica.take()
        values = self._model.whole([state.values for state in states])
        slots: list[dict[str, np.ndarray]] = [{} for _ in values]
        for name in dict.fromkeys(name for state in states for by_name in state.slots for name in by_name):
            missing = np.empty(0)
            joined = self._model.whole([[by_name.get(name, missing) for by_name in state.slots] for state in states])
            for by_name, array, value in zip(slots, joined, values, strict=True):
                if array.shape == value.shape:
                    by_name[name] = array
        return TrainingState(
            values, slots, max((state.scalars for state in states), key=lambda scalars: int(scalars["iteration"]))
        )

    def memories(self) -> list[OpenedMemory]:
        """Returns where each server has its values, with `Hogwild`.

        Raises:
            MessageRefusedError: a server has no room for this worker, or other options.
            PeerLostError: a server cannot be reached.
        """
        return [
            answer for answer, _ in self._answers(lambda server, id: OpenMemory(id, self._worker, self._incarnation))
        ]

    def report(self) -> ModelReport:
        """Returns what the servers have done so far for the model."""
        key = self._model.name, self._occurrence
        reports = [report for report, _ in self._answers(lambda server, id: Inspect(id))]
        return merge_reports(
            [shard for report in reports for shard in report.models if (shard.model, shard.occurrence) == key]
        )

    def whole(self, vectors: Vectors) -> list[np.ndarray]:
        """Returns the variables' arrays, joined from vectors of their parts."""
        layouts = [shapes.layout() for shapes in self._model.shapes]
        return self._model.whole(
            [
                list(layout.arrays(server_vectors).values())
                for layout, server_vectors in zip(layouts, vectors, strict=True)
            ]
        )

    def suspend(self, is_end: bool = False) -> None:
        """Tells the servers that nobody needs to wait for this worker until its next step.

        Args:
            is_end: whether a call of `fit` has ended.
        """
        if is_end or not self.is_suspended:
            self._answers(lambda server, id: Suspend(id, self._worker, self._incarnation, is_end))
            self.is_suspended = True

    def leave(self, is_over: bool = False) -> None:
        """Leaves all servers, after they have answered what is under way. The next request attaches again.

        Args:
            is_over: whether this worker goes on with another optimizer for the same variables.
        """
        with contextlib.suppress(TfdistError):
            self._finish()
        for connection in self._connections:
            with contextlib.suppress(TfdistError):
                connection.request(
                    lambda id: LeaveModel(id, self._worker, self._incarnation, is_over), timeout=_LEAVE_SECONDS
                )
        self.is_suspended = True

    def close(self, is_over: bool = False) -> None:
        """Leaves all servers, after they have answered what is under way, and closes the connections.

        A server that does not answer learns from the rendezvous that this worker has ended.

        Args:
            is_over: whether this worker goes on with another optimizer for the same variables.
        """
        self.leave(is_over)
        for connection in self._connections:
            connection.close()

    def _suspend_on_others(self) -> None:
        """Suspends this worker on the other servers, after the first one has forgotten it.

        Its clock on the first server is different now. Without this, workers could wait for each other on different
        servers.
        """
        for connection in self._connections[1:]:
            try:
                connection.request(lambda id: Suspend(id, self._worker, self._incarnation))
            except MessageRefusedError as error:
                if not error.refused.is_unknown:  # else no worker waits for this one there either
                    raise

    def _attach(self, server: int) -> None:
        while True:
            try:
                return self._attached(server)
            except MessageRefusedError as error:
                if not error.refused.is_unknown:
                    raise  # if the worker is unknown, the server was started again in between

    def _attached(self, server: int) -> None:
        connection, model = self._connections[server], self._model
        connection.answer_bytes = model.nbytes
        answer, _ = connection.request(
            lambda id: Attach(
                id,
                self._worker,
                self._incarnation,
                model.name,
                self._occurrence,
                self._place,
                model.described,
                self._joins,
                self._program,
            )
        )
        self._clocks[server] = answer.clock
        for worker, incarnation, sequence in answer.counted:
            self.counted[worker, incarnation] = max(sequence, self.counted.get((worker, incarnation), -1))
        connection.share(self._worker, model.area(server), 1 + self._prefetch)
        if answer.is_created:
            return
        described, optimizer = self._described
        held = self._model.held(server, described)
        part = TrainingState([]) if self._values is None else self._model.part_of(server, self._values())
        slots, scalars = part.names()
        shapes = model.shapes[server]
        of_held = tuple(shapes.shapes), tuple(dtype.name for dtype in shapes.dtypes)

        def create(id: int) -> Message:
            sender = id, self._worker, self._incarnation
            return CreateShard(*sender, model.name, held, optimizer, self._values is not None, slots, scalars, *of_held)

        connection.request(create, part.arrays())
        if self._values is None:  # waits for the chief's values, or for a snapshot
            connection.request(functools.partial(self._pulling("values"), server))

    def _pulling(self, what: PullKind) -> Callable[[int, int], Message]:
        return lambda server, id: Pull(id, self._worker, self._incarnation, what)

    def _finish(self) -> None:
        """Waits for the answers to all that is under way."""
        while self._under_way:
            self._under_way.pop(0)()

    def _received(self, answers: Sequence[tuple[Any, list[np.ndarray]]]) -> None:
        """Queues the values of all servers, and notes their versions."""
        vectors = self._noted(answers)
        for server, (replica, (answer, _), arrays) in enumerate(zip(self._replicas, answers, vectors, strict=True)):
            try:
                replica.receive(answer.edition, answer.kinds, arrays, answer.copy)
            except ValueError as error:
                raise TfdistError(f"ps {server} has answered with values that do not fit: {error}") from None

    def _noted(self, answers: Sequence[tuple[Any, list[np.ndarray]]]) -> Vectors:
        """Notes the versions of all servers' answers, and returns their vectors."""
        versions = [answer.version for answer, _ in answers]
        for server, (before, now) in enumerate(zip(self._versions, versions, strict=True)):
            if now < before:
                log.warning("tfdist: ps %d was started again: at least %d updates are lost.", server, before - now)
        self._versions = versions
        self.iterations = max(answer.iterations for answer, _ in answers)
        self._clocks = [answer.clock for answer, _ in answers]
        return [vectors for _, vectors in answers]

    def _answers(self, make: Callable[[int, int], Message]) -> list[tuple[Any, list[np.ndarray]]]:
        """Returns the answers of all servers to a message, after waiting for what is under way."""
        self._finish()
        return self._sent(make)()

    def _sent(
        self,
        make: Callable[[int, int], Message],
        arrays: Sequence[Sequence[np.ndarray]] | None = None,
        servers: range | None = None,
    ) -> Callable[[], list[tuple[Any, list[np.ndarray]]]]:
        """Sends a message to each server, or to some; returns a function that waits for the answers."""
        given = arrays or [()] * len(self._connections)
        sent = [
            (server, _PendingMessage(self._connections[server], functools.partial(make, server), given[server]))
            for server in (range(len(self._connections)) if servers is None else servers)
        ]
        for server, message in sent:
            self._unanswered[server].append(message)

        def receive(server: int, message: _PendingMessage) -> tuple[Any, list[np.ndarray]]:
            try:
                while True:
                    try:
                        return self._connections[server].receive(message.request)
                    except MessageRefusedError as error:
                        if not error.refused.is_unknown:
                            raise
                    self._attach(server)
                    if not server and self._has_tickets:
                        self._suspend_on_others()
                    for other in self._unanswered[server]:  # in their order: after a later push, this one is a copy
                        other.send()
            finally:
                self._unanswered[server].remove(message)

        return lambda: [receive(server, message) for server, message in sent]


class _PendingMessage:
    """A message under way to a server.

    Args:
        connection: connection to the server.
        make: function that makes the message with an ``id``.
        arrays: arrays that follow.

    Attributes:
        request: request as it was sent last.
    """

    def __init__(self, connection: Connection, make: Callable[[int], Message], arrays: Sequence[np.ndarray]) -> None:
        self._connection = connection
        self._make = make
        self._arrays = arrays
        self.send()

    def send(self) -> None:
        """Sends the message under a new number."""
        self.request: Request = self._connection.send(self._make, self._arrays)
