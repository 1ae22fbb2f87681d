"""The processes that update the variables of an optimizer, and keep the optimizer's variables for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.sharding import Variable, assign_shards
from tfdist.strategies.divided import described_variables, optimizer_slots


class Dealing:
    """The variables of an optimizer, each dealt to one process, so that their bytes are as even as possible.

    Variables are dealt whole, the largest first, since some optimizers compute norms of them. The result depends on
    their shapes and dtypes only, so it is the same on all processes.

    Args:
        variables: variables that the optimizer updates.
        processes: number of processes.
        rank: rank of this process.

    Attributes:
        rank: as given.
    """

    def __init__(self, variables: Sequence[Any], processes: int, rank: int) -> None:
        self.rank = rank
        sizes = [
            Variable(tuple(variable.shape), tf.as_dtype(variable.dtype).size, splits=False) for variable in variables
        ]
        self._owners: dict[int, tuple[Any, int]] = {}
        for owner, parts in enumerate(assign_shards(sizes, processes).shards):
            for part in parts:
                variable = variables[part.variable]
                self._owners[id(variable)] = variable, owner
        self._slots: dict[int, tuple[Any, int]] = {}
        self._placed = 0

    def owner(self, variable: Any) -> int:
        """Returns the rank that updates a variable.

        Args:
            variable: one of the optimizer's variables.

        Raises:
            KeyError: the optimizer was not built with the variable.
        """
        return self._owners[id(variable)][1]

    def add_slot(self, slot: Any, variable: Any) -> None:
        """Notes that the optimizer keeps a variable for one that it updates.

        Args:
            slot: variable of the optimizer.
            variable: variable that the optimizer updates.
        """
        if id(variable) in self._owners:
            self._slots[id(slot)] = slot, self.owner(variable)

    @property
    def slots(self) -> dict[int, tuple[Any, int]]:
        """The optimizer's variables that one process holds, with its rank, by their `id`, in the order of creation."""
        return dict(self._slots)

    def place(self, optimizer: Any) -> None:
        """Allocates the optimizer's variables that this process holds, and leaves the others to their owners.

        Args:
            optimizer: the optimizer, built; the caller is in the scope of its strategy, and in `local_only` there.
        """
        variables = optimizer_slots.optimizer_variables(optimizer)
        if len(variables) == self._placed:
            return
        self._placed = len(variables)
        for variable, slot in optimizer_slots.slots_by_variable(optimizer):
            self.add_slot(slot, variable)
        for variable in variables:
            _, owner = self._slots.get(id(variable), (None, self.rank))
            if owner == self.rank:
                described_variables.allocate(variable)
            elif not described_variables.is_elsewhere(variable):
                described_variables.leave_to(variable, f"rank {owner}")


def contained(optimizers: Iterable[Any]) -> list[Any]:
    """Returns optimizers together with those that they contain, each once.

    Args:
        optimizers: Keras optimizers.
    """
    by_id: dict[int, Any] = {}
    for optimizer in optimizers:
        inner = getattr(optimizer, "inner_optimizer", None)
        parts = [*getattr(optimizer, "optimizers", ()), *([] if inner is None else [inner])]
        by_id.update((id(part), part) for part in (optimizer, *contained(parts)))
    return list(by_id.values())
