"""The state of a shard: all that is needed to continue training, on any number of servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np


class HeldRows(msgspec.Struct, frozen=True):
    """Rows of a variable that a server holds.

    Attributes:
        path: path of the variable, as Keras names it, made unique in the model.
        begin: first row; 0 for a scalar.
        end: row behind the last one; 1 for a scalar.
        rows: number of rows of the whole variable; 1 for a scalar.
        decays: whether the optimizer's weight decay applies to the variable.
        constraint: the variable's constraint, as `keras.constraints.serialize` describes it; None if it has none.
    """

    path: str
    begin: int
    end: int
    rows: int
    decays: bool = True
    constraint: dict[str, Any] | None = None


SequenceRows = tuple[tuple[int, int, int], ...]
"""Worker, incarnation, and the sequence of its last push: a dictionary in a form that messages and JSON can have."""


def rows_of_sequences(sequences: Mapping[tuple[int, int], int]) -> SequenceRows:
    """Returns a dictionary of sequences, by worker and incarnation, as rows."""
    return tuple((*source, sequence) for source, sequence in sequences.items())


def sequences_of_rows(rows: SequenceRows) -> dict[tuple[int, int], int]:
    """Returns rows of sequences as a dictionary, by worker and incarnation."""
    return {(worker, incarnation): sequence for worker, incarnation, sequence in rows}


class ShardProgress(msgspec.Struct, frozen=True):
    """How far a shard's training is: what has to survive together with its values, in snapshots and in copies.

    Attributes:
        version: number of updates that were applied.
        counted: by worker, the number of its pushes that were counted, without those that wait to be applied.
        applied: worker, incarnation, and the sequence of its last push that was applied or dropped.
        assigned: version at the last assignment to the variables by a program; -1 if there was none.
    """

    version: int
    counted: dict[int, int] = {}
    applied: SequenceRows = ()
    assigned: int = -1


@dataclass(frozen=True)
class TrainingState:
    """Values of variables, and the optimizer's variables.

    Attributes:
        values: value of each variable.
        slots: for each variable, by name, the optimizer's slots, of the variable's shape.
        scalars: by name, the optimizer's scalars that belong to no variable, such as ``"iteration"``.
    """

    values: Sequence[np.ndarray]
    slots: Sequence[Mapping[str, np.ndarray]] = ()
    scalars: Mapping[str, np.ndarray] = field(default_factory=dict)

    def names(self) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
        """Returns the names of slots and scalars, in the order of `arrays`."""
        return tuple(tuple(slots) for slots in self.slots), tuple(self.scalars)

    def arrays(self) -> list[np.ndarray]:
        """Returns all arrays: the values, the slots of each variable, the scalars."""
        slots = [array for variable_slots in self.slots for array in variable_slots.values()]
        return [*self.values, *slots, *self.scalars.values()]

    @classmethod
    def of_arrays(
        cls,
        arrays: Sequence[np.ndarray],
        variables: int,
        slots: Sequence[Sequence[str]],
        scalars: Sequence[str],
    ) -> TrainingState:
        """Makes a state from what `arrays` and `names` have returned.

        Args:
            arrays: arrays of the state, in the order of `arrays`.
            variables: number of variables.
            slots: for each variable, the names of its slots.
            scalars: names of the scalars.

        Raises:
            ValueError: there are too many or too few arrays.
        """
        expected = variables + sum(map(len, slots)) + len(scalars)
        if len(arrays) != expected:
            raise ValueError(f"{len(arrays)} arrays for a state that has {expected}")
        rest = iter(arrays)
        values = [next(rest) for _ in range(variables)]
        return cls(
            values, [{name: next(rest) for name in names} for names in slots], {name: next(rest) for name in scalars}
        )
