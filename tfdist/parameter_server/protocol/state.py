"""The state of a shard: all that is needed to go on from here, on any number of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np


class Held(msgspec.Struct, frozen=True):
    """Rows of a variable that a server holds.

    Attributes:
        path: of the variable, as Keras names it; made unique in the model.
        begin: first row; 0 for a scalar.
        end: row behind the last one; 1 for a scalar.
        rows: of the whole variable; 1 for a scalar.
        decays: whether the optimizer's weight decay applies to it.
        constraint: as `keras.constraints.serialize` describes it, or None.
    """

    path: str
    begin: int
    end: int
    rows: int
    decays: bool = True
    constraint: dict[str, Any] | None = None


@dataclass(frozen=True)
class State:
    """Values and the optimizer's variables.

    Attributes:
        values: of the variables.
        slots: for each variable, by name, the optimizer's slots, of the variable's shape.
        scalars: by name, the optimizer's scalars that belong to no variable, such as ``"iteration"``.
    """

    values: Sequence[np.ndarray]
    slots: Sequence[Mapping[str, np.ndarray]] = ()
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)

    def names(self) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
        """The names of slots and scalars, in the order of `arrays`."""
        return tuple(tuple(own) for own in self.slots), tuple(self.scalars)

    def arrays(self) -> list[np.ndarray]:
        """All arrays: the values, the slots of each variable, the scalars."""
        slots = [array for own in self.slots for array in own.values()]
        return [*self.values, *slots, *self.scalars.values()]

    @classmethod
    def of_arrays(
        cls,
        arrays: Sequence[np.ndarray],
        variables: int,
        slots: Sequence[Sequence[str]],
        scalars: Sequence[str],
    ) -> State:
        """The state of which `arrays` and `names` are given.

        Args:
            arrays: all of them.
            variables: how many there are.
            slots: for each variable, the names of its slots.
            scalars: names.

        Raises:
            ValueError: there are more or fewer arrays.
        """
        expected = variables + sum(map(len, slots)) + len(scalars)
        if len(arrays) != expected:
            raise ValueError(f"{len(arrays)} arrays for a state that has {expected}")
        rest = iter(arrays)
        values = [next(rest) for _ in range(variables)]
        return cls(
            values, [{name: next(rest) for name in own} for own in slots], {name: next(rest) for name in scalars}
        )
