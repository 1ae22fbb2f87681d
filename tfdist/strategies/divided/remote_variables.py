"""Access to variables of other processes: one process requests them one by one, and the others answer."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine import operations
from tfdist.engine.edges import Edges
from tfdist.engine.group import ProcessGroup
from tfdist.sharding import Ownership
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
        owner: function that returns the processes in the group that answer for a variable.
        variables: all variables that some process does not hold, in the same order on all processes.
        name: name for messages, which all processes have for these variables alone.
        part: function that returns this process's part of a variable that it answers for: a Keras or TensorFlow
            variable; by default, all of it.
    """

    def __init__(
        self,
        group: ProcessGroup,
        owner: Callable[[Any], Ownership],
        variables: Sequence[Any],
        name: str,
        part: Callable[[Any], Any] = lambda variable: variable,
    ) -> None:
        self._group = group
        self._owner = owner
        self._part = part
        self._variables = list(variables)
        self._places = {id(variable): place for place, variable in enumerate(variables)}
        self._name = name
        self._edges = Edges(group)

    @contextlib.contextmanager
    def led(self) -> Iterator[None]:
        """Context in which the leader reads and assigns all variables; the other processes `answer` until it ends."""
        self._meet()
        try:
            with described_variables.reading(self._read), described_variables.assigning(self._assign):
                yield
        finally:
            for rank in range(1, self._group.size):
                self._request(rank, _Request.END, 0)

    def answer(self) -> None:
        """Answers the leader's requests until the leader ends them."""
        self._meet()
        while True:
            kind, place = self._edges.receive(_REQUEST, 0, f"{self._name}: requests").numpy()
            if kind == _Request.END:
                return
            variable = self._variables[place]
            part = self._part(variable)
            if kind == _Request.READ:
                self._edges.send(tf.convert_to_tensor(part), 0, self._edge(variable))
            else:
                spec = tf.TensorSpec(part.shape, variable.dtype)
                part.assign(self._edges.receive(spec, 0, self._edge(variable)))

    def _meet(self) -> None:
        """Waits for all processes, so that a leader alone leaves no requests behind that others would answer later."""
        self._group.run(f"save, load or export of {self._name}, which all processes call", operations.barrier())

    def _read(self, variable: Any) -> tf.Tensor:
        owner = self._owner(variable)
        parts = []
        for rank in owner.holders:
            if rank == self._group.rank:
                parts.append(tf.convert_to_tensor(self._part(variable)))
                continue
            self._request(rank, _Request.READ, self._places[id(variable)])
            spec = tf.TensorSpec(owner.shape(variable.shape, rank), variable.dtype)
            parts.append(self._edges.receive(spec, rank, self._edge(variable)))
        return parts[0] if len(parts) == 1 else tf.concat(parts, owner.axis)

    def _assign(self, variable: Any, value: Any) -> None:
        owner = self._owner(variable)
        value = tf.cast(value, variable.dtype)
        for rank in range(self._group.size):
            if not owner.includes(rank):
                continue
            part = value[owner.part(rank)] if owner.is_cut else value
            if rank == self._group.rank:
                self._part(variable).assign(part)
                continue
            self._request(rank, _Request.ASSIGN, self._places[id(variable)])
            self._edges.send(part, rank, self._edge(variable))

    def _request(self, rank: int, kind: _Request, place: int) -> None:
        self._edges.send(tf.constant([kind, place], tf.int64), rank, f"{self._name}: requests")

    def _edge(self, variable: Any) -> str:
        return f"{self._name}: values of {variable.dtype} in {len(variable.shape)} dimension(s)"
