"""The `extended` of `AllReduceStrategy(mesh=…)`: weights of some layers are split over an axis of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine.group import ProcessGroup
from tfdist.notices import notice
from tfdist.runtime.mesh import Mesh
from tfdist.sharding import Ownership
from tfdist.strategies.all_reduce.weight_parts_extended import WeightPartsExtended
from tfdist.strategies.divided import weight_parts
from tfdist.strategies.divided.dealing import Dealing, contained
from tfdist.strategies.divided.footprint import split_footprint_of
from tfdist.strategies.divided.gathering import Collectives
from tfdist.strategies.divided.split_axis import MeshAxes, Split


class MeshExtended(WeightPartsExtended):
    """A `WeightPartsExtended` that also splits the weights of layers that compute in parts.

    Args:
        mesh: the processes as a mesh.
        shard: as in `AllReduceStrategy`; None leaves all other weights, and the optimizer's variables for them, whole
            on each process.
        strategy: the strategy that this is the `extended` of.
        group: the processes that train together.
        arguments: further ones of `AllReduceExtended`.
        gather: as in `AllReduceStrategy`.
    """

    def __init__(
        self,
        mesh: Mesh,
        shard: str | None,
        strategy: tf.distribute.Strategy,
        group: ProcessGroup,
        *arguments: Any,
        gather: str = "layer",
    ) -> None:
        mesh.check_size(group.size)
        self.more = f", mesh={mesh}, shard={shard!r}"
        self._shard = shard
        self._axes = MeshAxes(mesh, group)
        super().__init__(strategy, group, *arguments, gather=gather)
        if shard != "weights":
            self.divides = lambda _: False

    def parts_of_new(self, variable: Any, split: Split | None) -> tuple[Ownership, Collectives] | None:
        """Returns the part of a new weight that each process keeps, and its collectives; see `KeepsParts`."""
        if split is None:
            return super().parts_of_new(variable, None)
        axis = self._axes.axis(split.mesh_axis)
        return None if axis.size == 1 else (axis.owner(tuple(variable.shape), split), axis)

    def number_of_parts(self, mesh_axis: str) -> int:
        """Returns the number of parts of weights that are split over an axis of the mesh; see `KeepsParts`."""
        return self._axes.axis(mesh_axis).size

    def deal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Deals the variables of an optimizer, if that is wanted or some weights are split; see `DealsVariables`."""
        if self._shard is not None:
            super().deal(optimizer, variables)
            return
        are_split = any(weight_parts.of(variable) is not None for variable in variables)
        if are_split and len(contained([optimizer])) == 1:
            self.check_updates(optimizer, variables)
            self._dealings[optimizer] = Dealing(variables, self.group.size, self.group.rank, deals=False)

    def tell(self, optimizer: Any, dealing: Dealing, strays: Sequence[Any]) -> None:
        """Tells what split weights and the optimizer's variables for them take."""
        if self._shard is not None or strays:
            super().tell(optimizer, dealing, strays)
            return
        notice("tfdist: %s: %s", self._axes.mesh, split_footprint_of(dealing))
