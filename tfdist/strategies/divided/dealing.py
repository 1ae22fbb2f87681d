"""The processes that update the variables of an optimizer, and keep the optimizer's variables for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import keras
import tensorflow as tf

from tfdist.private import optimizers
from tfdist.sharding import EVERYONE, Ownership, Variable, assign_owners
from tfdist.strategies.divided import described_variables, optimizer_slots, weight_parts
from tfdist.strategies.keras import keras_assignments


class Dealing:
    """The variables of an optimizer, dealt to processes, so that their bytes are as even as possible.

    Variables are dealt whole, the largest first. Those that are large compared with an equal share are cut by rows, if
    the optimizer updates each element apart. The result depends on shapes and dtypes only, so it is the same on all
    processes.

    Args:
        variables: variables that the optimizer updates.
        processes: number of processes.
        rank: rank of this process.
        cuts: whether the optimizer updates each element apart. Variables with a constraint stay whole all the same,
            and those that are not Keras's.
        rows: by id, the parts of weights of which no process has all; by default of those that are kept in parts.
        deals: whether whole variables are dealt; otherwise each process updates all of them.

    Attributes:
        processes: as given.
        rank: as given.
        is_complete: whether each process has something to update.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        processes: int,
        rank: int,
        cuts: bool = False,
        rows: Mapping[int, Ownership] | None = None,
        deals: bool = True,
    ) -> None:
        self.rank = rank
        kept = {id(variable): found for variable in variables if (found := weight_parts.of(variable)) is not None}
        self._in_parts = {key: found.owner for key, found in kept.items()} if rows is None else dict(rows)
        whole = [variable for variable in variables if not self.is_in_parts(variable)]
        sizes = [
            Variable(
                tuple(variable.shape),
                tf.as_dtype(variable.dtype).size,
                splits=cuts and isinstance(variable, keras.Variable) and variable.constraint is None,
            )
            for variable in whole
        ]
        self.processes = processes
        self._updated = list(variables)
        self._owners = dict(self._in_parts)
        dealt = assign_owners(sizes, processes) if deals else [EVERYONE] * len(whole)
        self._owners.update((id(variable), owner) for variable, owner in zip(whole, dealt, strict=True))
        owners = self._owners.values()
        self.is_complete = all(any(owner.includes(rank) for owner in owners) for rank in range(processes))
        self._slots: dict[int, Any] = {}
        self._parts: dict[int, tuple[Any, tuple[slice, ...], Any]] = {
            key: (found.variable, found.index, found.part) for key, found in kept.items()
        }
        self._views = [variable for variable in whole if self.owner(variable).is_cut]
        self._placed = 0

    def owner(self, variable: Any) -> Ownership:
        """Returns the processes that update a variable, or keep a slot for it.

        Args:
            variable: one of the optimizer's variables, or one of `slots`.

        Raises:
            KeyError: the optimizer was not built with the variable.
        """
        return self._owners[id(variable)]

    def is_in_parts(self, variable: Any) -> bool:
        """Returns whether no process has all of a variable that the optimizer updates."""
        return id(variable) in self._in_parts

    def updates(self, variable: Any) -> bool:
        """Returns whether this process updates some or all of a variable.

        Args:
            variable: one of the optimizer's variables, or one of `slots`.
        """
        return self.owner(variable).includes(self.rank)

    def add_slot(self, slot: Any, variable: Any) -> None:
        """Notes that the optimizer keeps a variable for one that it updates.

        Args:
            slot: variable of the optimizer.
            variable: variable that the optimizer updates.
        """
        if id(variable) in self._owners:
            self._owners[id(slot)] = owner = self.owner(variable)
            if owner != EVERYONE:
                self._slots[id(slot)] = slot

    @property
    def slots(self) -> list[Any]:
        """The optimizer's variables that are dealt, in the order of creation."""
        return list(self._slots.values())

    def nbytes(self, variables: Iterable[Any]) -> list[int]:
        """Returns the bytes of the parts of some variables, by rank.

        Args:
            variables: variables that the optimizer updates, or slots.
        """
        sums = [0] * self.processes
        for variable in variables:
            owner, itemsize = self.owner(variable), tf.as_dtype(variable.dtype).size
            for rank in range(self.processes):
                if owner.includes(rank):
                    sums[rank] += prod(owner.shape(variable.shape, rank)) * itemsize
        return sums

    @property
    def updated(self) -> list[Any]:
        """The variables that the optimizer updates."""
        return list(self._updated)

    def part(self, variable: Any) -> Any:
        """Returns this process's part of a variable that it updates, or of a slot.

        Args:
            variable: variable of which this process has some or all.

        Returns:
            The variable; if it is cut, a variable of TensorFlow that has this process's rows.
        """
        _, _, part = self._parts.get(id(variable), (None, None, variable))
        return part

    def assign_part(self, slot: Any, value: Any) -> None:
        """Assigns this process's rows of a value to a slot that is cut; leaves other variables as they are.

        Args:
            slot: any variable.
            value: value of the whole slot.
        """
        if id(slot) in self._parts:
            _, index, part = self._parts[id(slot)]
            part.assign(tf.cast(value[index], part.dtype))

    def find_slots(self, optimizer: Any) -> list[Any]:
        """Finds the slots that an optimizer keeps.

        Args:
            optimizer: the optimizer, built.

        Returns:
            Variables of the optimizer, other than scalars, of which it is not known to which weight they belong.
        """
        for variable, slot in optimizer_slots.slots_by_variable(optimizer):
            self.add_slot(slot, variable)
        variables = optimizer_slots.optimizer_variables(optimizer)
        return [variable for variable in variables if id(variable) not in self._owners and len(variable.shape)]

    def place(self, optimizer: Any) -> list[Any]:
        """Allocates the optimizer's variables that this process holds, and leaves the others to their owners.

        Args:
            optimizer: the optimizer, built; the caller is in the scope of its strategy, and in `local_only` there.

        Returns:
            Those that `find_slots` returns; if there are any, nothing is allocated.
        """
        variables = optimizer_slots.optimizer_variables(optimizer)
        if len(variables) == self._placed:
            return []
        strays = self.find_slots(optimizer)
        if strays:
            return strays
        self._placed = len(variables)
        for variable in variables:
            owner = self._owners.get(id(variable), Ownership(self.rank))
            if owner in (EVERYONE, Ownership(self.rank)):
                described_variables.allocate(variable)
            elif described_variables.is_elsewhere(variable):
                continue
            elif owner.owner is not None:
                described_variables.leave_to(variable, f"rank {owner.owner}")
            else:
                part = owner.part(self.rank)
                self._parts[id(variable)] = variable, part, described_variables.keep_part(variable, part)
        for variable in self._views:
            if id(variable) not in self._parts:
                part, key = self.owner(variable).part(self.rank), optimizers.key_of(variable)
                self._parts[id(variable)] = variable, part, described_variables.part_of(variable, part, key)
        return []

    def refresh(self) -> None:
        """Gives the parts of variables that are cut the variables' values; in a replica, or eagerly outside of all.

        A part has no memory of its own then, until it is assigned another value: TensorFlow's rows of a tensor are a
        view, and to assign a view copies nothing. Rows of other than multiples of 64 bytes are copied, and so are those
        of a part to whose single rows the optimizer has assigned.
        """
        for variable in self._views:
            _, index, part = self._parts[id(variable)]
            part.assign(keras_assignments.copy_of(variable)[index], read_value=False)

    @contextlib.contextmanager
    def parts(self) -> Iterator[None]:
        """Context in which variables that are cut, and what the optimizer keeps for them, are this process's rows."""
        with described_variables.standing_in(self._parts.values()):
            yield


def contained(outer: Iterable[Any]) -> list[Any]:
    """Returns optimizers together with those that they contain, each once.

    Args:
        outer: Keras optimizers.
    """
    by_id: dict[int, Any] = {}
    for optimizer in outer:
        inner = getattr(optimizer, "inner_optimizer", None)
        parts = [*getattr(optimizer, "optimizers", ()), *([] if inner is None else [inner])]
        by_id.update((id(part), part) for part in (optimizer, *contained(parts)))
    return list(by_id.values())
