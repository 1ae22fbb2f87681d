"""The state of a parameter server as plain arrays; joins parts of variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist.errors import TfdistError


class SnapshotError(TfdistError):
    """Snapshots cannot be written or read, are of another model, or lack rows."""


@dataclass(frozen=True, eq=False)
class PartState:
    """Rows of one variable, with the optimizer's slots for them.

    Attributes:
        path: Keras path of the variable.
        begin: first row; 0 for a scalar.
        end: row behind the last one; 1 for a scalar.
        rows: number of rows of the whole variable; 1 for a scalar.
        value: values of the rows, of shape ``(end - begin, ...)``, or ``()`` for a scalar.
        slots: optimizer's slots by name. A slot of the value's shape is per element, and is split and joined with it.
            Slots of other shapes exist only for whole variables.

    Raises:
        ValueError: the bounds and the shapes do not fit each other.
    """

    path: str
    begin: int
    end: int
    rows: int
    value: np.ndarray
    slots: dict[str, np.ndarray]

    def __post_init__(self) -> None:
        held = self.value.shape[0] if self.value.ndim else 1
        fits = 0 <= self.begin <= self.end <= self.rows and held == self.end - self.begin
        if not fits or (self.value.ndim == 0 and self.rows != 1):
            raise ValueError(
                f"rows {self.begin} to {self.end} of {self.rows} of the variable {self.path!r} cannot have a value of "
                f"shape {self.value.shape}"
            )
        for name, slot in self.slots.items():
            if slot.shape != self.value.shape and not self.is_whole:
                raise ValueError(
                    f"the slot {name!r} of the variable {self.path!r} has the shape {slot.shape}; slots of some of its "
                    f"rows must have the shape of the value, {self.value.shape}"
                )

    @property
    def is_whole(self) -> bool:
        """Whether the part has all rows of the variable."""
        return self.end - self.begin == self.rows


def join(parts: Sequence[PartState]) -> PartState:
    """Joins parts of one variable.

    Args:
        parts: at least one part; each begins with the row at which the part before it ends.

    Raises:
        SnapshotError: the parts differ in dtypes, in shapes of rows, or in slots.
    """
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    for other in parts[1:]:
        if _form(other) != _form(first):
            raise SnapshotError(
                f"the parts of the variable {first.path!r} come from servers with different optimizers: one has "
                f"{_form(first)}, another {_form(other)}. Remove the snapshots of one of them."
            )
    slots = {name: np.concatenate([part.slots[name] for part in parts]) for name in first.slots}
    value = np.concatenate([part.value for part in parts])
    return PartState(first.path, first.begin, parts[-1].end, first.rows, value, slots)


def _form(part: PartState) -> tuple[int, str, dict[str, str]]:
    """Returns what all parts of a variable have in common: number of rows, and dtypes and row shapes of all arrays."""
    return part.rows, _row(part.value), {name: _row(slot) for name, slot in sorted(part.slots.items())}


def _row(array: np.ndarray) -> str:
    return f"{array.dtype.name} {array.shape[1:]}"


@dataclass(frozen=True, eq=False)
class ShardState:
    """The state that a server needs to go on.

    Attributes:
        digest: digest of the model's variables; the same for any number of servers.
        version: the number of updates that were applied.
        optimizer: the optimizer, serialized by Keras to JSON values.
        scalars: by name, the optimizer's variables that belong to no variable, such as iterations and learning rate.
        parts: parts of the variables that the server holds.
        counted: by worker, the number of its pushes that were counted, without those that wait to be applied.
        sequences: by worker and incarnation, the sequence of the last push that was applied or dropped.
        deals: state of the job's dealer (see `tfdist.parameter_server.dealing.deals.DealerService.state`); None if this
            server has no dealer.
        assigned: version at the last assignment to the variables by a program; -1 if there was none.
    """

    digest: str
    version: int
    optimizer: dict[str, Any]
    scalars: dict[str, np.ndarray]
    parts: tuple[PartState, ...]
    counted: dict[int, int]
    sequences: dict[tuple[int, int], int]
    deals: dict[str, Any] | None = None
    assigned: int = -1
