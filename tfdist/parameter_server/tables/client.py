"""The worker's side of a table on parameter servers: splits lookups and updates by server."""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tfdist.errors import TfdistError
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.key_hash import server_of
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.messages import Refused
from tfdist.parameter_server.protocol.tables import (
    AssignRows,
    AttachTable,
    ExportTable,
    Lookup,
    TableMessage,
    UpdateRows,
)
from tfdist.parameter_server.shard.row_optimizer import within_graph
from tfdist.parameter_server.tables.row_cache import CachePolicy, RowCache
from tfdist.parameter_server.tables.tables import Tables
from tfdist.parameter_server.worker.client import MessageRefusedError

_CHIEF = 0
_NONE = np.empty(0, np.int64), np.empty((0, 1))
"""Empty slots and values."""

Answered = tuple[Any, list[np.ndarray]]


class Requests(Protocol):
    """The part of a connection that a table needs; see `tfdist.parameter_server.worker.client.Connection`."""

    answer_bytes: int

    def send(self, make: Callable[[int], TableMessage], arrays: Sequence[np.ndarray] = ()) -> Any:
        """Sends a message, and returns the request."""

    def receive(self, request: Any) -> Answered:
        """Waits for the answer to a request."""

    def close(self) -> None:
        """Closes the connection."""


class InProcess:
    """Tables of this process in place of a connection to a server, for a job without servers."""

    answer_bytes = 0

    def __init__(self) -> None:
        self._tables = Tables()
        self._numbers = itertools.count()

    def send(self, make: Callable[[int], TableMessage], arrays: Sequence[np.ndarray] = ()) -> tuple[str, Answered]:
        """Handles a message at once, and returns its answer as the request."""
        answers: list[Answered] = []
        message = make(next(self._numbers))
        with within_graph.set_to(True):
            self._tables.heard(message, list(arrays), lambda answer, rows: answers.append((answer, list(rows))))
        return type(message).__name__, answers[0]

    def receive(self, request: tuple[str, Answered]) -> Answered:
        """Returns the answer to a message.

        Raises:
            MessageRefusedError: the message was refused.
        """
        name, (answer, arrays) = request
        if isinstance(answer, Refused):
            raise MessageRefusedError(f"{name} is refused: {answer.why}", answer)
        return answer, arrays

    def close(self) -> None:
        """Does nothing, as there is no connection."""


class TableConnections:
    """Connections to all servers, which the tables of a worker share; one thread at a time uses them.

    Args:
        connections: connection to each server, in the order of the cluster.
        worker: number of this task.

    Attributes:
        connections: connection to each server, in the order of the cluster.
        worker: number of this task.
        lock: lock that is held while a table uses the connections.
        failure: error that has ended the communication; None without an error.
    """

    def __init__(self, connections: Sequence[Requests], worker: int = _CHIEF) -> None:
        self.connections = connections
        self.worker = worker
        self.lock = threading.RLock()
        self.failure: TfdistError | None = None

    def close(self) -> None:
        """Closes the connections."""
        for connection in self.connections:
            connection.close()


@dataclass(frozen=True)
class TableSpec:
    """The description of a table, which is equal on all workers.

    Attributes:
        dim: number of columns.
        initial: initial values of rows.
        policy: policy that says which keys get a row.
        dtype: dtype of the rows, float32 or float64.
        workers: number of workers that update the table together, once in each step, by the sum of their gradients;
            0 if each gradient is an update.
    """

    dim: int
    initial: InitialRows
    policy: RowPolicy
    dtype: str = "float32"
    workers: int = 0


class TableClient:
    """A worker's access to a table whose rows are distributed over all servers.

    If a server was started again, the client describes the table again and repeats its message. The server counts a
    repeated update once.

    Args:
        line: connections to the servers.
        name: name of the table, the same on all workers.
        form: description of the table.
        cache: policy by which this worker caches rows; None caches none. Must be None where workers update together.

    Attributes:
        form: description of the table.
        cache: cache of rows; None without one.
    """

    def __init__(self, line: TableConnections, name: str, form: TableSpec, cache: CachePolicy | None = None) -> None:
        self._line = line
        self._name = name
        self.form = form
        self.cache = RowCache(cache, form.dim, form.dtype) if cache is not None and cache.staleness else None
        self._optimizer: dict[str, Any] | None = None
        self._incarnation = secrets.randbits(63)
        self._lookups = itertools.count()
        self._updates = itertools.count()
        self._has_updated = False

    @property
    def is_chief(self) -> bool:
        """Whether this worker sets learning rates and loads rows."""
        return self._line.worker == _CHIEF

    def set_optimizer(self, optimizer: dict[str, Any]) -> None:
        """Describes the table with this optimizer to all servers.

        Args:
            optimizer: optimizer of the rows, serialized by `keras.optimizers.serialize`.

        Raises:
            MessageRefusedError: the optimizer cannot be used, or the table exists with another description.
            PeerLostError: a server cannot be reached.
        """
        with self._line.lock:
            self._optimizer = optimizer
            for server in range(len(self._line.connections)):
                self._attach(server)

    def lookup(self, keys: np.ndarray, create: bool) -> np.ndarray:
        """Returns the rows of keys. Cached rows are used only if ``create`` is set.

        Args:
            keys: keys, int64 [n], distinct.
            create: whether this is a use of the keys, which makes rows; True in training.

        Returns:
            A new array [n, dim].

        Raises:
            PeerLostError: a server cannot be reached.
        """
        if self.cache is None or not create:
            return self._read(keys, create)
        with self._line.lock:
            lookup = self.cache.find(keys)
            if len(lookup.missing):
                lookup.values[lookup.missing] = read = self._read(keys[lookup.missing], create)
                self.cache.put(lookup, read)
        return lookup.values

    def _read(self, keys: np.ndarray, create: bool) -> np.ndarray:
        """Reads the rows of keys from the servers; see `lookup`."""
        parts = self._parts(keys)
        rows = np.empty((len(keys), self.form.dim), self.form.dtype)
        with self._line.lock:
            sequence = next(self._lookups)
            answers = self._asked(
                [[keys[part]] if len(part) else None for part in parts],
                functools.partial(Lookup, sequence=sequence, create=create),
            )
        for part, answer in zip(parts, answers, strict=True):
            if answer is not None:
                rows[part] = answer[1][0]
        return rows

    def update(self, keys: np.ndarray, gradients: np.ndarray, rate: float | None = None, create: bool = False) -> None:
        """Makes one step of the optimizer, on all servers; where workers update together, when all have called this.

        Args:
            keys: keys, int64 [n]; the gradients of repeated keys are summed.
            gradients: gradients [n, dim], of the rows' dtype.
            rate: the chief's learning rate; None leaves it as it is.
            create: whether this is a use of the keys, as their lookup was not.

        Raises:
            MessageRefusedError: a server refuses the update.
            PeerLostError: a server cannot be reached.
        """
        parts = self._parts(keys)
        make = functools.partial(UpdateRows, learning_rate=rate, create=create)
        with self._line.lock:
            sequence = next(self._updates)
            pushed = [[keys[part], gradients[part]] for part in parts]
            written = [self.cache.written(arrays[0]) for arrays in pushed] if self.cache is not None else []
            pulls = any(len(places) for places, _ in written)
            if pulls:
                pushed = [[*arrays, places] for arrays, (places, _) in zip(pushed, written, strict=True)]
            answers = self._asked(pushed, functools.partial(make, sequence=sequence, pulls=pulls))
            if self.cache is not None:
                values = [answer[1][0] for answer in answers if answer is not None and pulls]
                slots = [part_slots for _, part_slots in written]
                self.cache.end_step(*((np.concatenate(slots), np.concatenate(values)) if pulls else _NONE))
            self._has_updated = True

    def assign(self, keys: np.ndarray, values: np.ndarray) -> None:
        """Replaces all rows; on the chief only. Before the chief's first update, tables that were updated stay.

        Args:
            keys: keys, int64 [n], distinct.
            values: values of their rows, [n, dim].

        Raises:
            MessageRefusedError: a server refuses the rows.
            PeerLostError: a server cannot be reached.
        """
        if not self.is_chief:
            return
        only_if_new = not self._has_updated
        given = values.astype(self.form.dtype, copy=False)
        with self._line.lock:
            if self.cache is not None:
                self.cache.clear()
            self._asked(
                [[keys[part], given[part]] for part in self._parts(keys)],
                functools.partial(AssignRows, only_if_new=only_if_new),
            )

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns all rows of all servers.

        Returns:
            The keys in ascending order, int64 [rows], and their values [rows, dim].

        Raises:
            PeerLostError: a server cannot be reached.
        """
        with self._line.lock:
            answers = self._asked([[] for _ in self._line.connections], ExportTable)
        keys = np.concatenate([answer[1][0] for answer in answers if answer is not None])
        values = np.concatenate([answer[1][1] for answer in answers if answer is not None])
        order = np.argsort(keys)
        return keys[order], values[order]

    def _parts(self, keys: np.ndarray) -> list[np.ndarray]:
        """Returns the places of each server's keys."""
        servers = server_of(keys, len(self._line.connections))
        return [np.flatnonzero(servers == server) for server in range(len(self._line.connections))]

    def _attach(self, server: int) -> None:
        connection, form = self._line.connections[server], self.form
        describe = functools.partial(
            AttachTable,
            dim=form.dim,
            dtype=form.dtype,
            initial=form.initial,
            policy=form.policy,
            optimizer=self._optimizer,
            workers=form.workers,
        )
        request = connection.send(lambda id: describe(id, self._line.worker, self._incarnation, self._name))
        answer, _ = connection.receive(request)
        row_bytes = 8 + form.dim * np.dtype(form.dtype).itemsize
        connection.answer_bytes = max(connection.answer_bytes, 2 * answer.rows * row_bytes)

    def _asked(
        self, arrays: Sequence[Sequence[np.ndarray] | None], make: Callable[[int, int, int, str], TableMessage]
    ) -> list[Answered | None]:
        """Sends a message to each server that arrays are given for, and waits for all answers.

        Args:
            arrays: arrays of the message to each server; None sends it no message.
            make: function that makes the message from its ``id``, the worker, the incarnation and the table's name.
        """

        def made(id: int) -> TableMessage:
            return make(id, self._line.worker, self._incarnation, self._name)

        try:
            sent = [
                None if payload is None else connection.send(made, payload)
                for connection, payload in zip(self._line.connections, arrays, strict=True)
            ]
            answers: list[Answered | None] = []
            for server, (request, payload) in enumerate(zip(sent, arrays, strict=True)):
                connection = self._line.connections[server]
                while request is not None:
                    try:
                        answers.append(connection.receive(request))
                        break
                    except MessageRefusedError as error:
                        if not error.refused.is_unknown:
                            raise
                    self._attach(server)
                    request = connection.send(made, payload or ())
                else:
                    answers.append(None)
            return answers
        except TfdistError as error:
            self._line.failure = error
            raise
