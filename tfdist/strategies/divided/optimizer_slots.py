"""The variables that an optimizer keeps for each variable that it updates ("slots")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tfdist.private import optimizers
from tfdist.private.keras import backend


def slots_by_variable(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each variable that an optimizer updates with a slot of it, for each slot.

    Slots are found in lists that have an element for each updated variable, and in dictionaries that have, in the same
    order, an element of the same shape.

    Args:
        optimizer: a built Keras optimizer; those that it contains are not searched.
    """
    updated = optimizers.variables_of(optimizer)
    for name, kept in vars(optimizer).items():
        if name in ("_variables", "_trainable_variables"):
            continue
        if not isinstance(kept, (list, tuple, dict)) or len(kept) != len(updated):
            continue
        pairs = list(zip(updated, kept.values() if isinstance(kept, dict) else kept, strict=True))
        if isinstance(kept, dict) and any(getattr(slot, "shape", None) != variable.shape for variable, slot in pairs):
            continue
        for variable, slot in pairs:
            if isinstance(slot, backend.Variable):
                yield variable, slot


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Returns all variables of an optimizer and its inner one, including those that it does not save.

    Args:
        optimizer: a Keras optimizer.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    kept = [variable for value in vars(optimizer).values() if isinstance(value, (list, tuple)) for variable in value]
    updated = {id(variable) for variable in optimizers.variables_of(optimizer)}
    variables = [*optimizer.variables, *([] if inner is None else optimizer_variables(inner))]
    return variables + [
        variable for variable in kept if isinstance(variable, backend.Variable) and id(variable) not in updated
    ]
