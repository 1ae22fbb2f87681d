"""An axis of a mesh along which layers are split: each process computes with a part of a layer's weight.

The batch stays divided over all processes. A split layer takes the rows of all processes along the axis together,
computes a part of their features, and gives each process the result for its own rows. So what such a layer returns is
what the whole layer would return for the process's share of the batch.

The gradient of a process's part of a weight is complete when it leaves the tape: it comes from the rows of all
processes along the axis, each counted by its weight in the batch, and is summed over the processes that have copies.

References:
    Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014.
    Shoeybi et al., Megatron-LM: Training multi-billion parameter language models using model parallelism, 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist.engine.batches import BatchExchange
from tfdist.engine.bridge import Bridge
from tfdist.engine.group import ProcessGroup
from tfdist.engine.slices import Slices
from tfdist.private import graphs
from tfdist.private import tensorflow as private
from tfdist.runtime.mesh import Mesh
from tfdist.sharding import Ownership, even_bounds
from tfdist.strategies import current_strategy
from tfdist.strategies.divided.gathering import Collectives
from tfdist.strategies.divided.weight_parts import WeightPart
from tfdist.strategies.keras import collective_gradients

Map = Callable[[tf.Tensor, Any], tuple[tf.Tensor, tf.Tensor]]
"""Linear map of a batch that is divided over processes, given the rows of each or None; returns these, too."""
_SPLIT = "_tfdist_split"
"""Attribute of a Keras variable: the `Split` that its layer asks for."""
_COUNTS = "_tfdist_counts"
"""Attribute of a graph: by axis, the counts of the last batch in it whose features were left in parts."""


@dataclass(frozen=True)
class Split:
    """How a layer's weight is split.

    Attributes:
        mesh_axis: name of the mesh's axis over which it is split.
        axis: the weight's own axis that is cut.
        layer: the layer's class and name, for messages.
        elements: what the layer calls the elements along the axis, for messages.
    """

    mesh_axis: str
    axis: int
    layer: str
    elements: str


def ask_for(variable: Any, split: Split | None) -> None:
    """Notes how a variable is to be split, where its strategy splits it later than it is made.

    Args:
        variable: weight of a layer, or a variable that an optimizer keeps for it.
        split: how; None leaves it whole.
    """
    setattr(variable, _SPLIT, split)


def asked_for(variable: Any) -> Split | None:
    """Returns how a variable is to be split; None if it stays whole.

    Args:
        variable: a Keras variable.
    """
    return getattr(variable, _SPLIT, None)


def owner_of(shape: Sequence[int], split: Split, parts: int, places: Sequence[int]) -> Ownership:
    """Returns the part of a weight that each process of a mesh keeps.

    Args:
        shape: shape of the weight.
        split: how it is split.
        parts: number of processes along the mesh's axis.
        places: by rank, the place of a process along it.

    Raises:
        ValueError: the axis of the weight does not divide evenly.
    """
    length = shape[split.axis]
    if length % parts:
        fits = sorted({length // parts * parts, -(-length // parts) * parts} - {0})
        raise ValueError(
            f"{split.layer}: {length} {split.elements} do not divide over the {parts} processes of the mesh's axis "
            f"{split.mesh_axis!r}; {' or '.join(map(str, fits))} would"
        )
    return Ownership(None, even_bounds(length, parts), split.axis, tuple(places))


class MeshAxes:
    """The axes of a mesh over which layers are split, each with its collectives.

    Args:
        mesh: the mesh.
        group: its processes.
        sums_copies: whether gradients are summed over the processes that have copies of a part when they leave the
            tape; otherwise the strategy does so later.

    Attributes:
        mesh: as given.
    """

    def __init__(self, mesh: Mesh, group: ProcessGroup, sums_copies: bool = True) -> None:
        self.mesh = mesh
        self._group = group
        self._sums_copies = sums_copies
        self._axes: dict[str, SplitAxis] = {}

    def axis(self, name: str) -> SplitAxis:
        """Returns an axis.

        Args:
            name: its name.

        Raises:
            ValueError: the mesh has no such axis.
        """
        if name not in self._axes:
            mesh, group = self.mesh, self._group
            along = group.subgroup(mesh.along(name, group.rank))
            everyone, across = group, group.subgroup(mesh.across(name, group.rank))
            if not self._sums_copies:
                everyone, across = along, group.subgroup((group.rank,))
            places = [mesh.place(name, rank) for rank in range(group.size)]
            self._axes[name] = SplitAxis(name, everyone, along, across, places)
        return self._axes[name]


class SplitAxis(Collectives):
    """The processes along one axis of a mesh, and the collectives of layers and weights that are split over them.

    Args:
        name: name of the axis.
        everyone: the processes over which gradients of whole weights are summed.
        along: the processes along the axis through this one.
        across: the processes over which gradients of parts are summed, which have the same parts as this one.
        places: the place along the axis of each process of the mesh.
    """

    gathers_for_calls = False

    def __init__(
        self, name: str, everyone: ProcessGroup, along: ProcessGroup, across: ProcessGroup, places: Sequence[int]
    ) -> None:
        super().__init__(self._whole, self._sums)
        self.name = name
        self.size = along.size
        self._place = along.rank
        self._places = tuple(places)
        self._batches = batches = BatchExchange(along)
        self._gather_rows: Map = batches.gathered
        self._sum_rows: Map = lambda terms, counts: (batches.scattered_sum(terms, counts), counts)
        self._split_features: Map = batches.to_features
        self._join_features: Map = lambda features, counts: (batches.to_rows(features, counts), counts)
        self._bridge = Bridge(everyone)
        self._copies = Bridge(across)
        self._slices = Slices(across)
        self._counts: tf.Tensor | None = None

    def owner(self, shape: Sequence[int], split: Split) -> Ownership:
        """Returns the part of a weight that each process of the mesh keeps.

        Args:
            shape: shape of the weight.
            split: how it is split.

        Raises:
            ValueError: the axis of the weight does not divide evenly.
        """
        return owner_of(shape, split, self.size, self._places)

    # Weights.

    def own(self, weights: Sequence[WeightPart]) -> list[tf.Tensor]:
        """Returns this process's parts of weights, for a layer that computes with all of them.

        Args:
            weights: weights that are split over this axis; one, if its gradient is sparse.
        """
        parts = [weight.copy.read_value() for weight in weights]
        with private.stop_recording():
            values = [tf.identity(part) for part in parts]
        return graphs.with_gradient(values, parts, lambda *gradients: self._over_copies(gradients, weights))

    def _over_copies(self, gradients: Sequence[Any], weights: Sequence[WeightPart]) -> list[Any]:
        if isinstance(gradients[0], tf.IndexedSlices):
            return self._slices.all_reduce(gradients)
        for gradient, weight in zip(gradients, weights, strict=True):
            if tf.is_symbolic_tensor(gradient):
                gradient.set_shape(weight.part.shape)  # so that it is known for that of a part
        names = [weight.variable.path for weight in weights]
        return self._copies.all_reduce(list(gradients), names=names, verb="sum of parts")

    def _whole(self, weights: list[WeightPart]) -> list[tf.Tensor]:
        return [self._batches.all_gather(weight.copy.read_value(), weight.owner.axis) for weight in weights]

    def _sums(self, gradients: list[Any], weights: list[WeightPart]) -> list[Any]:
        sharing = current_strategy.sharing()
        terms = [tf.convert_to_tensor(gradient) for gradient in gradients]
        names = [weight.variable.path for weight in weights]
        sums = self._bridge.all_reduce(terms, names=names, weight=None if sharing is None else sharing.shares.weight())
        return [total[weight.index] for total, weight in zip(sums, weights, strict=True)]

    # Batches. What enters is this process's rows, and what leaves is.

    def enter(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the rows of all processes along the axis, and the number of each one's."""
        return _linear(self._gather_rows, self._sum_rows, collective_gradients.sent(rows))

    def enter_by_features(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns a part of the features of all rows along the axis, and the number of each process's rows."""
        return _linear(self._split_features, self._join_features, collective_gradients.sent(rows))

    def leave(self, features: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns this process's rows with all features.

        Args:
            features: this process's features of all rows.
            counts: rows of each process.
        """
        return collective_gradients.received(_linear(self._join_features, self._split_features, features, counts)[0])

    def leave_summed(self, terms: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns this process's rows of the sum of all processes' terms.

        Args:
            terms: this process's terms for all rows.
            counts: rows of each process.
        """
        return collective_gradients.received(_linear(self._sum_rows, self._gather_rows, terms, counts)[0])

    def rows_of_all(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all processes along the axis, of what has no gradient.

        Args:
            rows: this process's rows.
            counts: rows of each process.
        """
        return self._batches.gathered(rows, counts)[0]

    def own_rows(self, rows: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
        """Returns this process's rows of those of all processes along the axis.

        Args:
            rows: rows of all.
            counts: rows of each process.
        """
        begin = tf.reduce_sum(counts[: self._place])
        return rows[begin : begin + counts[self._place]]

    def note(self, counts: tf.Tensor) -> None:
        """Keeps the counts of a batch whose features are left in parts, for the layer that takes them.

        Args:
            counts: rows of each process.
        """
        if tf.executing_eagerly():
            self._counts = counts
            return
        graph = tf.compat.v1.get_default_graph()
        setattr(graph, _COUNTS, {**getattr(graph, _COUNTS, {}), self.name: counts})

    def noted(self, layer: str) -> tf.Tensor:
        """Returns the counts that `note` has kept last.

        Args:
            layer: the layer that asks, for the error.

        Raises:
            ValueError: there are none.
        """
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        counts = self._counts if graph is None else getattr(graph, _COUNTS, {}).get(self.name)
        if counts is None:
            raise ValueError(
                f"{layer}: input_is_parallel=True needs the features of a layer with gather_output=False before it, "
                f"split over the axis {self.name!r}"
            )
        return counts


def _linear(of: Map, transpose: Map, given: tf.Tensor, counts: tf.Tensor | None = None) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a linear map of a batch, and counts; its gradient is the transpose, whose gradient is the map again."""
    with private.stop_recording():
        made, counts = of(given, counts)

    def backward(gradient: Any) -> list[tf.Tensor]:
        return [_linear(transpose, of, tf.convert_to_tensor(gradient), counts)[0]]

    return graphs.with_gradient([made], [given], backward)[0], counts
