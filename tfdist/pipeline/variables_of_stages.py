"""The variables of a model in stages, on all processes of all pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.exchange import Exchange
from tfdist.pipeline.mesh import PipelineMesh
from tfdist.pipeline.placement import Placement
from tfdist.sharding import Ownership
from tfdist.strategies.divided import weight_parts
from tfdist.strategies.divided.remote_variables import RemoteVariables
from tfdist.tensors import unnumbered


class VariablesOfStages(RemoteVariables):
    """The variables of a model and its optimizer on all processes.

    If several processes hold a variable, that of the first worker in the first pipeline answers requests for it.

    Args:
        mesh: the processes by worker and pipeline.
        placement: the workers that hold each variable.
        variables: all variables, in the same order on all processes.
        name: name of the model.
        parts: returns the processes that have each part of a variable, given the workers that hold it; None if it is
            not split.
    """

    def __init__(
        self,
        mesh: PipelineMesh,
        placement: Placement,
        variables: Sequence[Any],
        name: str,
        parts: Callable[[Any, Sequence[int]], Ownership | None] = lambda variable, workers: None,
    ) -> None:
        super().__init__(mesh.all_processes, self._holder, variables, name, _own)
        self._mesh = mesh
        self._placement = placement
        self._parts = parts

    def equalize(self, variables: Sequence[Any]) -> None:
        """Gives all processes that hold a variable the value of the first of them.

        Args:
            variables: some or all of the variables, the same on all processes.
        """
        mesh = self._mesh
        for variable in variables:
            workers = self._placement.workers(variable) or range(mesh.workers)
            ranks = tuple(dict.fromkeys(rank for worker in workers for rank in mesh.ranks(worker)))
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

    def _holder(self, variable: Any) -> Ownership:
        workers = self._placement.workers(variable)
        return self._parts(variable, workers) or Ownership(self._mesh.rank(workers[0], 0))


def _own(variable: Any) -> Any:
    """Returns this process's part of a variable that it holds."""
    kept = weight_parts.of(variable)
    return variable if kept is None else kept.copy
