"""Access to variables of other processes: one process requests them one by one, and the others answer."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.edges import Edges
from tfdist.engine.exchange import Exchange
from tfdist.pipeline import described_variables
from tfdist.pipeline.mesh import Mesh
from tfdist.pipeline.placement import Placement
from tfdist.tensors import unnumbered

_REQUEST = tf.TensorSpec([2], tf.int64)


class _Request(enum.IntEnum):
    END = 0
    READ = 1
    ASSIGN = 2


class RemoteVariables:
    """The variables of a model and its optimizer on all processes.

    Rank 0 is the leader: it reads and assigns variables of the other processes, of which it holds one at a time. If
    several processes hold a variable, that of the first worker in the first pipeline answers.

    Args:
        mesh: the processes by worker and pipeline.
        placement: the workers that hold each variable.
        variables: all variables, in the same order on all processes.
        name: name of the model.
    """

    def __init__(self, mesh: Mesh, placement: Placement, variables: Sequence[Any], name: str) -> None:
        self._mesh = mesh
        self._placement = placement
        self._variables = list(variables)
        self._places = {id(variable): place for place, variable in enumerate(variables)}
        self._name = name
        self._edges = Edges(mesh.all_processes)

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Context in which the leader reads and assigns all variables; the other processes `answer` until it ends."""
        try:
            with described_variables.reading(self._read), described_variables.assigning(self._assign):
                yield
        finally:
            for rank in range(1, self._mesh.all_processes.size):
                self._request(rank, _Request.END, 0)

    def answer(self) -> None:
        """Answers the leader's requests until the leader ends them."""
        while True:
            kind, place = self._edges.receive(_REQUEST, 0, f"{self._name}: requests").numpy()
            if kind == _Request.END:
                return
            variable = self._variables[place]
            if kind == _Request.READ:
                self._edges.send(tf.convert_to_tensor(variable.value), 0, self._edge(variable))
            else:
                variable.assign(self._edges.receive(_spec(variable), 0, self._edge(variable)))

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives all processes that hold a variable the value of the first of them.

        Args:
            variables: some or all of the variables, the same on all processes.
        """
        mesh = self._mesh
        for variable in variables:
            workers = self._placement.workers(variable) or range(mesh.workers)
            ranks = tuple(mesh.rank(worker, replica) for worker in workers for replica in range(mesh.data))
            if len(ranks) == 1 or mesh.all_processes.rank not in ranks:
                continue
            value = tf.convert_to_tensor(variable.value)
            key = f"{self._name}: {unnumbered(variable.path)} {self._places[id(variable)]}"
            exchange = Exchange(mesh.all_processes.subgroup(ranks))
            variable.assign(exchange.broadcast_once(value, key, f"{value.dtype.name} {value.shape}"))

    def broadcast(self, variable: Any) -> Any:
        """Returns the value of a variable, as an array, on all processes of this process's pipeline.

        Args:
            variable: one of the variables; the same on all processes.
        """
        workers = self._placement.workers(variable)
        if not workers or self._mesh.workers == 1:
            return variable.numpy()
        if self._placement.holds(variable):
            value = tf.convert_to_tensor(variable.value)
        else:
            value = tf.zeros(variable.shape, variable.dtype)
        return Exchange(self._mesh.pipeline).broadcast(value, workers[0]).numpy()

    def _read(self, variable: Any) -> tf.Tensor:
        rank = self._owner_rank(variable)
        self._request(rank, _Request.READ, self._places[id(variable)])
        return self._edges.receive(_spec(variable), rank, self._edge(variable))

    def _assign(self, variable: Any, value: Any) -> None:
        rank = self._owner_rank(variable)
        self._request(rank, _Request.ASSIGN, self._places[id(variable)])
        self._edges.send(tf.cast(value, variable.dtype), rank, self._edge(variable))

    def _owner_rank(self, variable: Any) -> int:
        """Returns the rank that answers for a variable."""
        return self._mesh.rank(self._placement.workers(variable)[0], 0)

    def _request(self, rank: int, kind: _Request, place: int) -> None:
        self._edges.send(tf.constant([kind, place], tf.int64), rank, f"{self._name}: requests")

    def _edge(self, variable: Any) -> str:
        return f"{self._name}: values of {variable.dtype} in {len(variable.shape)} dimension(s)"


def _spec(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)
