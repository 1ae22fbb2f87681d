"""A worker's part in training one model on parameter servers: what it pushes where, and what it gets back."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np

from tfdist.errors import TfdistError
from tfdist.parameter_server.client import Connection
from tfdist.parameter_server.messages import Attach, Create, Gradient, Held, Kind, Leave, Pull, Push, SetLearningRate
from tfdist.parameter_server.sharding import Dealing, Part, Variable, deal

_LEAVE_SECONDS = 2.0


class Session:
    """The connections to all servers, for one model.

    Args:
        connections: to each server, in the order of the cluster.
        worker: this task's number.
        paths: of the variables, as Keras names them.
        shapes: of the variables.
        dtypes: of the variables.
        splits: whether variables may be split by rows.

    Attributes:
        dealing: which server holds what.
        clock: the number of steps that this worker has pushed.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        worker: int,
        paths: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        dtypes: Sequence[np.dtype],
        splits: bool,
    ) -> None:
        self._connections = connections
        self._worker = worker
        self._incarnation = secrets.randbits(63)
        self._paths = list(paths)
        self._shapes = list(shapes)
        self._dtypes = list(dtypes)
        described = [Variable(shape, dtype.itemsize, splits) for shape, dtype in zip(shapes, dtypes, strict=True)]
        self.dealing: Dealing = deal(described, len(connections))
        self._digest = _digest(paths, shapes, dtypes, len(connections), splits)
        self._versions = [0] * len(connections)
        self._sequence = 0
        self.clock = 0
        self._pool = ThreadPoolExecutor(len(connections), thread_name_prefix="tfdist-servers")

    def begin(self, values: Sequence[np.ndarray] | None, optimizer: dict[str, Any] | None) -> list[np.ndarray]:
        """Attaches to all servers, and waits for the model.

        Args:
            values: the variables' first values; of the chief, else None.
            optimizer: as `keras.optimizers.serialize` describes it; of the chief, else None.

        Returns:
            The variables' values.

        Raises:
            RefusedError: the servers hold another model.
            PeerLostError: a server cannot be reached.
        """

        def attach(server: int) -> int:
            connection, parts = self._connections[server], self.dealing.shards[server]
            answer, _ = connection.request(lambda id: Attach(id, self._worker, self._incarnation, self._digest))
            if values is not None and optimizer is not None:
                held = tuple(Held(self._paths[part.variable], part.begin, part.end) for part in parts)
                arrays = [_part(values[part.variable], part) for part in parts]
                connection.request(lambda id: Create(id, self._digest, held, optimizer), arrays)
            return answer.clock

        self.clock = max(self._pool.map(attach, range(len(self._connections))))
        return self.pull()

    def step(self, gradients: Sequence[Gradient], samples: float = 1.0) -> list[np.ndarray]:
        """Pushes the gradients of one step, and gets the variables for the next one.

        Args:
            gradients: one for each variable.
            samples: their weight where several workers' are averaged.

        Returns:
            The variables' values, when this worker may have them.

        Raises:
            RefusedError: a server does not take them.
            PeerLostError: a server cannot be reached.
        """

        def push(server: int) -> None:
            arrays: list[np.ndarray] = []
            kinds: list[Kind] = []
            for part in self.dealing.shards[server]:
                kind, parts = _of_part(gradients[part.variable], part)
                kinds.append(kind)
                arrays += parts
            self._connections[server].request(
                lambda id: Push(
                    *(id, self._worker, self._incarnation, self._sequence, self.clock),
                    *(self._versions[server], samples, tuple(kinds)),
                ),
                arrays,
            )

        list(self._pool.map(push, range(len(self._connections))))
        self._sequence += 1
        self.clock += 1
        return self.pull()

    def pull(self) -> list[np.ndarray]:
        """The variables' values, when this worker may have them."""
        pulled = list(self._pool.map(self._pull, range(len(self._connections))))
        values: list[np.ndarray | None] = [None] * len(self._shapes)
        for parts, arrays in zip(self.dealing.shards, pulled, strict=True):
            for part, array in zip(parts, arrays, strict=True):
                whole = values[part.variable]
                if array.shape == self._shapes[part.variable]:
                    values[part.variable] = array
                    continue
                if whole is None:
                    whole = np.empty(self._shapes[part.variable], self._dtypes[part.variable])
                    values[part.variable] = whole
                whole[part.begin : part.end] = array
        return [value for value in values if value is not None]

    def _pull(self, server: int) -> list[np.ndarray]:
        answer, arrays = self._connections[server].request(
            lambda id: Pull(id, self._worker, self._incarnation, self.clock)
        )
        self._versions[server] = answer.version
        return arrays

    @property
    def version(self) -> int:
        """The number of updates that the parameters contain; of the server that has least."""
        return min(self._versions)

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate on all servers."""
        for connection in self._connections:
            connection.request(lambda id: SetLearningRate(id, value))

    def close(self) -> None:
        """Leaves all servers. One that does not answer learns from the rendezvous that this worker has ended."""
        for connection in self._connections:
            with contextlib.suppress(TfdistError):
                connection.request(lambda id: Leave(id, self._worker, self._incarnation), timeout=_LEAVE_SECONDS)
            connection.close()
        self._pool.shutdown()


def _digest(
    paths: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype],
    servers: int,
    splits: bool,
) -> str:
    described = [list(paths), [list(shape) for shape in shapes], [dtype.name for dtype in dtypes], servers, splits]
    return hashlib.sha256(msgspec.json.encode(described)).hexdigest()[:16]


def _part(value: np.ndarray, part: Part) -> np.ndarray:
    return value[part.begin : part.end] if value.ndim else value


def _of_part(gradient: Gradient, part: Part) -> tuple[Kind, list[np.ndarray]]:
    if gradient is None:
        return "none", []
    if isinstance(gradient, np.ndarray):
        return "dense", [_part(gradient, part)]
    rows, indices = gradient
    chosen = (indices >= part.begin) & (indices < part.end)
    return "sparse", [rows[chosen], indices[chosen] - part.begin]
