"""Access to variables of other processes: one process requests them one by one, and the others answer."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.edges import Edges
from tfdist.engine.group import ProcessGroup
from tfdist.strategies.divided import described_variables

_REQUEST = tf.TensorSpec([2], tf.int64)


class _Request(enum.IntEnum):
    END = 0
    READ = 1
    ASSIGN = 2


class RemoteVariables:
    """The variables of a model and its optimizers on all processes.

    Rank 0 is the leader: it reads and assigns variables of the other processes, of which it holds one at a time.

    Args:
        group: the processes.
        holder: function that returns the rank in the group of the process that answers for a variable.
        variables: all variables that some process does not hold, in the same order on all processes.
        name: name for messages, which all processes have for these variables alone.
    """

    def __init__(self, group: ProcessGroup, holder: Callable[[Any], int], variables: Sequence[Any], name: str) -> None:
        self._group = group
        self._holder = holder
        self._variables = list(variables)
        self._places = {id(variable): place for place, variable in enumerate(variables)}
        self._name = name
        self._edges = Edges(group)

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Context in which the leader reads and assigns all variables; the other processes `answer` until it ends."""
        try:
            with described_variables.reading(self._read), described_variables.assigning(self._assign):
                yield
        finally:
            for rank in range(1, self._group.size):
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

    def _read(self, variable: Any) -> tf.Tensor:
        rank = self._holder(variable)
        self._request(rank, _Request.READ, self._places[id(variable)])
        return self._edges.receive(_spec(variable), rank, self._edge(variable))

    def _assign(self, variable: Any, value: Any) -> None:
        rank = self._holder(variable)
        self._request(rank, _Request.ASSIGN, self._places[id(variable)])
        self._edges.send(tf.cast(value, variable.dtype), rank, self._edge(variable))

    def _request(self, rank: int, kind: _Request, place: int) -> None:
        self._edges.send(tf.constant([kind, place], tf.int64), rank, f"{self._name}: requests")

    def _edge(self, variable: Any) -> str:
        return f"{self._name}: values of {variable.dtype} in {len(variable.shape)} dimension(s)"


def _spec(variable: Any) -> tf.TensorSpec:
    return tf.TensorSpec(variable.shape, variable.dtype)
