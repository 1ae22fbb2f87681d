"""Finds which variable of a Keras optimizer belongs to which variable of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Slot:
    """A variable of an optimizer that belongs to one variable of the model.

    Attributes:
        variable: index of the model's variable.
        name: the slot's name, such as ``"momentum"``.
        value: the Keras variable.
    """

    variable: int
    name: str
    value: Any


def build(optimizer: Any, variables: Sequence[Any]) -> list[Slot]:
    """Builds an optimizer, and returns its slots.

    Args:
        optimizer: a Keras optimizer that is not built.
        variables: the Keras variables that it updates.
    """
    with _noted(optimizer, variables) as slots:
        optimizer.build(variables)
    return slots


def slots_of_built(optimizer: Any, variables: Sequence[Any]) -> list[Slot]:
    """Returns the slots of a built optimizer, found at the same places as in a copy that is built anew.

    Args:
        optimizer: a Keras optimizer, built on the variables.
        variables: the Keras variables that the optimizer was built on, in that order.
    """
    copy = type(optimizer).from_config(optimizer.get_config())
    slots_of_copy = {id(slot.value): slot for slot in build(copy, variables)}
    pairs = zip(copy.variables, optimizer.variables, strict=True)
    slots = [(slots_of_copy.get(id(of_copy)), original) for of_copy, original in pairs]
    return [Slot(slot.variable, slot.name, original) for slot, original in slots if slot is not None]


def scalars_of(optimizer: Any, slots: Sequence[Slot]) -> dict[str, Any]:
    """Returns the optimizer's scalar variables that belong to no variable of the model, such as ``"iteration"``.

    Returns:
        The Keras variables by name, without the number that Keras adds to a name that is taken.
    """
    in_slots = {id(slot.value) for slot in slots}
    return {
        re.sub(r"_\d+$", "", variable.path.rpartition("/")[2]): variable
        for variable in optimizer.variables
        if id(variable) not in in_slots and not len(variable.shape)
    }


@contextmanager
def _noted(optimizer: Any, variables: Sequence[Any]) -> Iterator[list[Slot]]:
    """Records the slots that the optimizer makes by `add_variable_from_reference`, Keras's method for slots.

    Adafactor also makes factors of another shape, by `add_variable` with the name of the variable that they belong to,
    just before a slot of that variable.
    """
    places = {id(variable): place for place, variable in enumerate(variables)}
    add, add_from_reference = optimizer.add_variable, optimizer.add_variable_from_reference
    slots: list[Slot] = []
    factors: dict[str, list[Any]] = {}

    def noting_factors(shape: Any, *args: Any, **kwargs: Any) -> Any:
        made = add(shape, *args, **kwargs)
        if len(shape):
            factors.setdefault(str(kwargs.get("name")), []).append(made)
        return made

    def noting(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        place = places[id(reference_variable)]
        for number, factor in enumerate(factors.pop(reference_variable.name, ())):
            slots.append(Slot(place, f"factor_{number}", factor))
        made = add_from_reference(reference_variable, *args, **kwargs)
        name = kwargs.get("name") or (args[0] if args else None) or "var"
        slots.append(Slot(place, name, made))
        return made

    object.__setattr__(optimizer, "add_variable", noting_factors)
    object.__setattr__(optimizer, "add_variable_from_reference", noting)
    try:
        yield slots
    finally:
        object.__delattr__(optimizer, "add_variable")
        object.__delattr__(optimizer, "add_variable_from_reference")
