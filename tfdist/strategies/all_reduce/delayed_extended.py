"""The `extended` of `AllReduceStrategy(delay=1)`: gradients are summed while the next step computes."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

from tfdist.strategies.abilities import DelaysUpdates
from tfdist.strategies.all_reduce import keras_delayed
from tfdist.strategies.all_reduce.delayed_sums import DelayedSums
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.keras import keras_variables


class DelayedExtended(AllReduceExtended, DelaysUpdates):
    """An `AllReduceExtended` with one device, whose sums of gradients are used a step later."""

    more = ", delay=1"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        keras_delayed.install()
        self._sums: weakref.WeakKeyDictionary[Any, DelayedSums] = weakref.WeakKeyDictionary()

    def delayed_sums(self, optimizer: Any, variables: list[Any]) -> DelayedSums:
        """Returns the delayed sums of an optimizer; makes them at the first call."""
        sums = self._sums.get(optimizer)
        if sums is None:
            number = self.group.number("optimizer that is late")
            name = f"late gradients of optimizer {number}"
            sums = self._sums[optimizer] = DelayedSums(self.group, name, variables, self.compressor)
        if [id(variable) for variable in sums.variables] != [id(variable) for variable in variables]:
            raise ValueError(
                f"AllReduceStrategy(delay=1): the optimizer {optimizer.name} got gradients of "
                f"{[variable.path for variable in variables]}, but in another step of "
                f"{[variable.path for variable in sums.variables]}: "
                "give it the gradients of all its variables in each step, or use one optimizer for each kind of step"
            )
        return sums

    def delayed_of(self, model: Any) -> list[tuple[Any, DelayedSums]]:
        """Returns the optimizers that have updated variables of a model, and their delayed sums."""
        ids = {id(variable) for variable in model.variables}
        optimizer_ids = {id(candidate) for candidate in keras_variables.optimizers(model)}
        return [
            (optimizer, sums)
            for optimizer, sums in list(self._sums.items())
            if id(optimizer) in optimizer_ids or any(id(variable) in ids for variable in sums.variables)
        ]

    def staleness(self, model: Any) -> Counter[int]:
        """Returns how often each staleness occurred, over all optimizers of a model."""
        return sum((sums.staleness for _, sums in self.delayed_of(model)), Counter())
