"""The `extended` of `AllReduceStrategy(shard="weights")`: each process keeps some rows of each large weight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.private.optimizers import updates_elements_apart
from tfdist.sharding import Ownership
from tfdist.strategies.all_reduce import keras_weight_parts, owned_gradients
from tfdist.strategies.all_reduce.sharded_extended import Divided, ShardedExtended
from tfdist.strategies.divided import dealing, weight_parts
from tfdist.strategies.divided.gathering import Collectives
from tfdist.strategies.divided.split_axis import Split
from tfdist.strategies.divided.weight_parts import WeightPart
from tfdist.strategies.divided_abilities import KeepsParts


class WeightPartsExtended(ShardedExtended, KeepsParts):
    """A `ShardedExtended` whose processes each keep some rows of each large weight, and gather them in each step.

    Args:
        arguments: those of `AllReduceExtended`.
        gather: ``"layer"`` or ``"model"``, as in `AllReduceStrategy`.

    Attributes:
        divides: function that tells whether a weight is cut; by default large ones are.
    """

    more = ", shard='weights'"

    def __init__(self, *arguments: Any, gather: str = "layer") -> None:
        if gather != "layer":
            self.more += f", gather={gather!r}"
        super().__init__(*arguments)
        self.divides: Callable[[Any], bool] = weight_parts.is_large
        keras_weight_parts.install()
        self.gathers_at_once = gather == "model"
        self.weights = Collectives(self._gathered, self._sums, self.gathers_at_once)

    def parts_of_new(self, variable: Any, split: Split | None) -> tuple[Ownership, Collectives] | None:
        """Returns the rows of a new weight that each process keeps, and the weight's collectives; see `KeepsParts`."""
        owner = weight_parts.owner_of_new(variable, self.group.size, self.divides)
        return None if owner is None else (owner, self.weights)

    def number_of_parts(self, mesh_axis: str) -> int:
        """Returns the number of parts of weights that are split over an axis of the mesh; see `KeepsParts`."""
        if self.group.size == 1:
            return 1
        raise ValueError(
            f"a layer is split over the axis {mesh_axis!r}, and the strategy has no mesh: add "
            f"AllReduceStrategy(mesh=tfdist.Mesh(…, {mesh_axis}=…)), or use the layer of Keras"
        )

    def initial_value(self, variable: Any, value: Any) -> tf.Tensor:
        """Returns the chief's initial value of a weight; see `KeepsParts`."""
        return self.value_of_the_chief(value, variable.name, self.group.number("variable"))

    def deal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Deals the variables of an optimizer; see `DealsVariables`."""
        self.check_updates(optimizer, variables)
        super().deal(optimizer, variables)

    def check_updates(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Checks that an optimizer can update this process's parts of weights.

        Args:
            optimizer: a Keras optimizer.
            variables: variables that it will update.

        Raises:
            ValueError: the optimizer looks at whole weights, of which this process has a part; or it scales the loss,
                and gradients are compressed.
        """
        parts = [variable for variable in variables if weight_parts.of(variable) is not None]
        if parts and self.compressor is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "AllReduceStrategy(shard='weights', compression=…) does not work with a LossScaleOptimizer: gradients "
                "are sent in the backward pass, before they are known to be finite, and what compression has left of "
                "them would be of another scale. Use bfloat16, which needs no scale, or shard='optimizer'."
            )
        if parts and len(dealing.contained([optimizer])) == 1 and not updates_elements_apart(optimizer):
            raise ValueError(
                f"each process keeps a part of the weight {parts[0].path}, and the optimizer {optimizer.name} may look "
                "at whole weights. Use one of Keras's optimizers that update each element apart, such as Adam; or "
                "AllReduceStrategy(shard='optimizer'), without split layers."
            )

    def assign_part(self, variable: Any, value: Any) -> None:
        """Assigns this process's part of a value to a variable that is divided; see `DividesUpdates`."""
        kept = weight_parts.of(variable)
        if kept is None:
            super().assign_part(variable, value)
        else:
            kept.assign(value)

    def _divided(self, model: Any) -> dict[int, Divided]:
        in_parts = {
            id(weight): Divided(weight, kept.owner, kept.part)
            for weight in model.weights
            if (kept := weight_parts.of(weight)) is not None
        }
        return {**in_parts, **super()._divided(model)}

    def _gathered(self, weights: list[WeightPart]) -> list[tf.Tensor]:
        return self.owned.gathered(
            [weight.copy.read_value() for weight in weights],
            [weight.spec for weight in weights],
            [weight.owner for weight in weights],
            [weight.variable.path for weight in weights],
            "weights",
        )

    def _sums(self, gradients: list[Any], weights: list[WeightPart]) -> list[Any]:
        variables, owners = [weight.variable for weight in weights], [weight.owner for weight in weights]
        return owned_gradients.own_sums(self, gradients, variables, owners, self.group.rank)
