"""The variables of a model in stages, on all processes of all pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.exchange import Exchange
from tfdist.pipeline.mesh import Mesh
from tfdist.pipeline.placement import Placement
from tfdist.sharding import Ownership
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
    """

    def __init__(self, mesh: Mesh, placement: Placement, variables: Sequence[Any], name: str) -> None:
        super().__init__(mesh.all_processes, self._holder, variables, name)
        self._mesh = mesh
        self._placement = placement

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

    def _holder(self, variable: Any) -> Ownership:
        return Ownership(self._mesh.rank(self._placement.workers(variable)[0], 0))
