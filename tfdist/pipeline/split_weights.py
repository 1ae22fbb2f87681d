"""The weights of split layers in a pipeline, and what an optimizer keeps for them: each process keeps a part.

The processes that are the same worker in all pipelines have copies of its stages. A layer is split over an axis of
their mesh, along which each of them keeps a part of the layer's weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.sums import Sums
from tfdist.pipeline.mesh import STAGE, PipelineMesh
from tfdist.private.models import initializer_of
from tfdist.private.optimizers import clips_itself, updates_elements_apart
from tfdist.sharding import EVERYONE, Ownership
from tfdist.strategies.all_reduce import owned_gradients
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.divided import described_variables, divided_updates, split_axis, weight_parts
from tfdist.strategies.divided.dealing import contained
from tfdist.strategies.divided.optimizer_slots import optimizer_variables
from tfdist.strategies.divided.split_axis import MeshAxes, SplitAxis
from tfdist.strategies.keras import keras_optimizers


class SplitWeights:
    """The weights that are split over axes of a mesh, seen from one process.

    Args:
        extended: the `extended` of the strategy.
        mesh: the processes by worker and pipeline.
        splits: whether layers are split over the mesh's axes; otherwise each process has its stages' weights whole.
    """

    def __init__(self, extended: AllReduceExtended, mesh: PipelineMesh, splits: bool) -> None:
        self._extended = extended
        self._mesh = mesh
        # Gradients are summed over copies once in a step, and not for each micro-batch.
        self._axes = MeshAxes(mesh.mesh, mesh.all_processes, sums_copies=False) if splits else None
        self._sums: dict[str, Sums] = {}

    def number_of_parts(self, mesh_axis: str) -> int:
        """Returns the number of parts of weights that are split over an axis of the mesh; see `SplitsLayers`."""
        if self._axes is None:
            if self._mesh.data == 1:
                return 1
            raise ValueError(
                f"a layer is split over the axis {mesh_axis!r}, and the strategy has no mesh: add PipelineStrategy("
                f"mesh=tfdist.Mesh({STAGE}=…, {mesh_axis}=…)), or use the layer of Keras"
            )
        if mesh_axis == STAGE:
            raise ValueError(
                f"a layer is split over the axis {STAGE!r}, along which the stages of the model are: use another axis "
                f"of {self._axes.mesh}, by mesh_axis="
            )
        return self._axes.axis(mesh_axis).size

    def owner(self, variable: Any, workers: Sequence[int]) -> Ownership | None:
        """Returns the processes that have each part of a variable; None if it is not split.

        Args:
            variable: a variable of a model or of its optimizer.
            workers: the workers that hold it.
        """
        axis, split = self._axis_of(variable), split_axis.asked_for(variable)
        if axis is None or split is None:
            return None
        owner = axis.owner(tuple(variable.shape), split)
        ranks = {rank for worker in workers for rank in self._mesh.ranks(worker)}
        places = tuple(place if rank in ranks else None for rank, place in enumerate(owner.places))
        return dataclasses.replace(owner, places=places)

    def copies(self, variable: Any, workers: Sequence[int]) -> int:
        """Returns the number of processes that update the same of a weight, of those that update a model together.

        Args:
            variable: a weight that this process holds.
            workers: the workers that hold it.
        """
        holders = len({rank for worker in workers for rank in self._mesh.ranks(worker)})
        if self._axes is None:
            return max(1, holders // self._mesh.data)
        axis = self._axis_of(variable)
        return max(1, holders // (1 if axis is None else axis.size))

    def allocate(self, variable: Any, workers: Sequence[int]) -> None:
        """Allocates a variable that this process holds, or this process's part of it.

        Args:
            variable: a variable of a model or of its optimizer; the caller is in the scope of its strategy.
            workers: the workers that hold it.
        """
        owner = self.owner(variable, workers)
        if owner is None:
            described_variables.allocate(variable)
            return
        if weight_parts.of(variable) is not None:
            return
        axis, extended = self._axis_of(variable), self._extended
        assert axis is not None
        with tf.init_scope():
            value = tf.convert_to_tensor(initializer_of(variable)(tuple(variable.shape), dtype=variable.dtype))
            value = extended.value_of_the_chief(value, variable.path, extended.group.number("variable"))

            def make(part: Any) -> None:
                with extended.local_only():  # others have other parts
                    described_variables.allocate(variable, part)

            weight_parts.keep(variable, value, owner, self._mesh.all_processes.rank, make, axis)

    def check_updates(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Checks that an optimizer can update the weights of a stage, or parts of weights.

        Args:
            optimizer: a Keras optimizer.
            variables: variables that it updates.

        Raises:
            ValueError: the optimizer looks at whole weights, of which processes have parts, or may look at all weights.
        """
        split = [variable for variable in variables if self._axis_of(variable) is not None]
        for updating in contained([optimizer]) if split else ():
            if len(contained([updating])) == 1 and not updates_elements_apart(updating):
                raise ValueError(
                    f"each process keeps a part of the weight {split[0].path}, and the optimizer {updating.name} may "
                    "look at whole weights. Use one of Keras's optimizers that update each element apart, such as Adam"
                )
        for updating in contained([optimizer]) if self._mesh.all_processes.size > 1 else ():
            if clips_itself(updating):
                raise ValueError(
                    f"the optimizer {updating.name} clips gradients in a method of its own, which may look at those of "
                    "all weights, of which a process has its stage's. Use clipvalue=, clipnorm= or global_clipnorm="
                )

    def update(
        self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], workers: Sequence[Sequence[int]]
    ) -> None:
        """Updates this process's weights, or its parts of them.

        Args:
            optimizer: a Keras optimizer.
            gradients: gradients of the weights, or None.
            variables: the weights.
            workers: the workers that hold each weight.
        """
        places = [place for place, gradient in enumerate(gradients) if gradient is not None]
        axes = [self._axis_of(variable) for variable in variables]
        of_parts = [0.0 if axis is None else axis.size / self._mesh.data for axis in axes]
        shares = divided_updates.gradient_shares(
            [1.0 / self.copies(variables[place], workers[place]) for place in places],
            [of_parts[place] for place in places],
        )
        if not any(of_parts):
            with shares:
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return
        whole = [place for place in places if not of_parts[place]]
        sums = dict(enumerate(gradients))
        given, of = [gradients[place] for place in whole], [variables[place] for place in whole]
        totals = owned_gradients.own_sums(self._extended, given, of, [EVERYONE] * len(whole), 0)
        sums.update(zip(whole, totals, strict=True))
        for name in dict.fromkeys(axis.name for axis in axes if axis is not None):
            here = [place for place in places if (axis := axes[place]) is not None and axis.name == name]
            given, names = [gradients[place] for place in here], [variables[place].path for place in here]
            sums.update(zip(here, self._over_copies(name).all_reduce(given, names), strict=True))
        parts = weight_parts.only_parts([*variables, *optimizer_variables(optimizer)])
        with parts, keras_optimizers.summed_before(), shares:
            optimizer.apply_gradients(zip(sums.values(), variables, strict=True))

    def _over_copies(self, name: str) -> Sums:
        """Returns sums over the processes that have the same parts as this one along an axis."""
        if name not in self._sums:
            mesh, group = self._mesh, self._mesh.all_processes
            alike = mesh.ranks(mesh.worker)
            copies = tuple(rank for rank in mesh.mesh.across(name, group.rank) if rank in alike)
            self._sums[name] = Sums(group.subgroup(copies))
        return self._sums[name]

    def _axis_of(self, variable: Any) -> SplitAxis | None:
        """Returns the axis over which a variable is split; None if it is not."""
        split = split_axis.asked_for(variable)
        if split is None or self._axes is None:
            return None
        axis = self._axes.axis(split.mesh_axis)
        return None if axis.size == 1 else axis
