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
    Pull,
    PullKind,
    Push,
    Suspend,
)
from tfdist.parameter_server.protocol.packing import Packed
from tfdist.parameter_server.protocol.report import ModelReport, merge_reports
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.protocol.wire import Message
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError
from tfdist.parameter_server.worker.dealt_pushes import DealtPushes
from tfdist.parameter_server.worker.exchange import Answers, Exchange, Make
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
        sender: number of this task, and random number of this session, by which servers know it.
        dealt_pushes: those pushes whose batches were dealt.
        pushes: number of steps that this worker has pushed.
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
        self.sender = worker, secrets.randbits(63)
        self._exchange = Exchange(connections, self._attach_again)
        self.dealt_pushes = DealtPushes(connections, self._exchange, self.sender)
        self._model = model
        self._place = len(begun)
        self._occurrence = list(begun).count(model.name)
        self._prefetch = prefetch
        self._under_way: list[Callable[[], Answers]] = []
        self._replicas = model.replicas(pull_compression)
        self._described: tuple[Sequence[HeldRows], dict[str, Any]] = ((), {})
        self._values: Callable[[], TrainingState] | None = None
        self._versions = [0] * len(connections)
        self.pushes = 0
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

        Args:
            gradients: by server, gradients of its parts.
            samples: weight of the gradients where several workers' gradients are averaged.
            rate: the chief's learning rate; None on other workers.
            ticket: ticket of the batch, if it was dealt (`DealtPushes`).
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

        places = [
            [place for place, kind in enumerate(pushed.kinds) if kind == "sparse"] if "sparse" in pushed.kinds else []
            for pushed in gradients
        ]
        for replica, sparse_places in zip(self._replicas, places, strict=True):
            replica.keep(sparse_places)
        sequence, versions = self.pushes, [version if read is None else read for version in self._versions]

        def push(dealt: int | Decision | None, server: int, id: int) -> Message:  # if repeated, with another clock
            kinds = gradients[server].kinds
            return Push(
                id,
                *self.sender,
                sequence,
                self._clocks[server],
                versions[server],
                samples,
                kinds=() if kinds.count("dense") == len(kinds) else kinds,
                learning_rate=rate,
                dealt=dealt,
                has=self._replicas[server].has,
                parts=parts,
            )

        arrays = [pushed.arrays() for pushed in gradients]
        self._under_way.append(
            self._exchange.send(functools.partial(push, None), arrays)
            if ticket is None
            else self.dealt_pushes.send(ticket, push, arrays, self._pulling("values"))
        )
        self.pushes += 1
        self.is_suspended = False
        self._finish(self._prefetch)
        return [replica.take(sparse_places) for replica, sparse_places in zip(self._replicas, places, strict=True)]

    def answers(self, make: Make) -> Answers:
        """Returns the answers of all servers to a message, after waiting for what is under way.

        Args:
            make: function that makes the message.

        Raises:
            MessageRefusedError: a server refuses the message.
            PeerLostError: a server cannot be reached.
        """
        self._finish()
        return self._exchange.send(make)()

    def pull(self) -> Vectors:
        """Pulls the variables' current values."""
        self._received(self.answers(self._pulling("values")))
        return [replica.take() for replica in self._replicas]

    def settle(self) -> list[np.ndarray]:
        """Waits for all steps under way; returns copies of the variables' arrays as they are after them."""
        self._finish()
        for replica in self._replicas:
            replica.take()
        return [array.copy() for array in self.values()]

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
        self._exchange.send(lambda server, id: AssignValues(id, *self.sender), self.parts(arrays))()

    def averages(self) -> list[np.ndarray]:
        """Returns the optimizer's moving averages of the variables; the values if it keeps none."""
        return self.whole(self._noted(self.answers(self._pulling("averages"))))

    def final(self) -> list[np.ndarray]:
        """Returns what the variables are after `fit`: `averages`, unless a program has assigned to them since."""
        return self.whole(self._noted(self.answers(self._pulling("final"))))

    def state(self) -> TrainingState:
        """Returns values, slots and scalars of the whole model."""
        answers = self.answers(self._pulling("state"))
        states = [
            TrainingState.of_arrays(arrays, len(shard), answer.slots, answer.scalars)
            for (answer, arrays), shard in zip(answers, self._model.dealing.shards, strict=True)
        ]
        for replica, shapes, (answer, _), state in zip(
            self._replicas, self._model.shapes, answers, states, strict=True
        ):
            replica.receive(answer.edition, (), shapes.layout().vectors(state.values))
            replica.take()
        return self._model.whole_state(states)

    def report(self) -> ModelReport:
        """Returns what the servers have done so far for the model."""
        key = self._model.name, self._occurrence
        reports = [report for report, _ in self.answers(lambda server, id: Inspect(id))]
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

    def parts(self, arrays: Sequence[np.ndarray]) -> Vectors:
        """Returns vectors of the parts of the variables' arrays; the inverse of `whole`."""
        parts = [self._model.part_of(server, TrainingState(arrays)).values for server in range(len(self._connections))]
        return [shapes.layout().vectors(part) for shapes, part in zip(self._model.shapes, parts, strict=True)]

    def suspend(self, is_end: bool = False) -> None:
        """Tells the servers that nobody needs to wait for this worker until its next step.

        Args:
            is_end: whether a call of `fit` has ended.
        """
        if is_end or not self.is_suspended:
            self.answers(lambda server, id: Suspend(id, *self.sender, is_end))
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
                connection.request(lambda id: LeaveModel(id, *self.sender, is_over), timeout=_LEAVE_SECONDS)
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

    def _attach_again(self, server: int) -> None:
        self._attach(server)
        self.dealt_pushes.attached_again(server)

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
                *self.sender,
                model.name,
                self._occurrence,
                self._place,
                model.described,
                self._joins,
                self._program,
                model.options,
            )
        )
        self._clocks[server] = answer.clock
        for worker, incarnation, sequence in answer.counted:
            self.counted[worker, incarnation] = max(sequence, self.counted.get((worker, incarnation), -1))
        connection.share(self.sender[0], model.area(server), 1 + self._prefetch)
        if answer.is_created:
            return
        described, optimizer = self._described
        held = self._model.held(server, described)
        part = TrainingState([]) if self._values is None else self._model.part_of(server, self._values())
        slots, scalars = part.names()
        shapes = model.shapes[server]
        of_held = tuple(shapes.shapes), tuple(dtype.name for dtype in shapes.dtypes)

        def create(id: int) -> Message:
            has_values = self._values is not None
            return CreateShard(id, *self.sender, model.name, held, optimizer, has_values, slots, scalars, *of_held)

        connection.request(create, part.arrays())
        if self._values is None:  # waits for the chief's values, or for a snapshot
            connection.request(functools.partial(self._pulling("values"), server))

    def _pulling(self, what: PullKind) -> Make:
        return lambda server, id: Pull(id, *self.sender, what)

    def _finish(self, left: int = 0) -> None:
        """Waits for the answers to all pushes that are under way, or to all but some."""
        while len(self._under_way) > left:
            self._received(self._under_way.pop(0)())

    def _received(self, answers: Answers) -> None:
        """Queues the values of all servers, and notes their versions."""
        vectors = self._noted(answers)
        for server, (replica, (answer, _), arrays) in enumerate(zip(self._replicas, answers, vectors, strict=True)):
            try:
                replica.receive(answer.edition, answer.kinds, arrays, answer.copy)
            except ValueError as error:
                raise TfdistError(f"ps {server} has answered with values that do not fit: {error}") from None

    def _noted(self, answers: Answers) -> Vectors:
        """Notes the versions of all servers' answers, and returns their vectors."""
        versions = [answer.version for answer, _ in answers]
        for server, (before, now) in enumerate(zip(self._versions, versions, strict=True)):
            if now < before:
                log.warning("tfdist: ps %d was started again: at least %d updates are lost.", server, before - now)
        self._versions = versions
        self.iterations = max(answer.iterations for answer, _ in answers)
        self._clocks = [answer.clock for answer, _ in answers]
        return [vectors for _, vectors in answers]
