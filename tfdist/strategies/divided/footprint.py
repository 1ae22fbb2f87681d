"""What an optimizer that is divided among processes takes in memory, and what its steps send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import tensorflow as tf

from tfdist.private.optimizers import updates_elements_apart, variables_of
from tfdist.sharding import Ownership
from tfdist.strategies.divided import described_variables, weight_parts
from tfdist.strategies.divided.dealing import Dealing, contained


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model that is trained by processes of which each updates some of the weights.

    Attributes:
        weights: bytes of the weights that a process has, at most; their gradients take as many.
        slots: by rank, bytes of the variables that the optimizer keeps there for weights.
        sent: bytes that a process sends in a step with dense gradients, at most; without what split layers exchange.
        in_parts: bytes of the weights of which each process has some rows, all together.
        at_once: whether a process gathers all of those for a step; otherwise it has those of about two layers at a
            time.
        is_split: whether there are split layers.
    """

    weights: int
    slots: tuple[int, ...]
    sent: int
    in_parts: int = 0
    at_once: bool = False
    is_split: bool = False

    def __str__(self) -> str:
        own = "at most " if self.in_parts else ""
        exchanged = ", and what split layers exchange" * self.is_split
        whole = f" {_size(self.in_parts)} of weights are whole from the forward to the backward pass." * self.at_once
        return (
            f"Its variables for weights take {_size(sum(self.slots))} in all, and at most {_size(max(self.slots))} in "
            f"each of {len(self.slots)} processes. Each process has weights and gradients of "
            f"{own}{_size(self.weights)} each, and sends up to {_size(self.sent)} in a step{exchanged}.{whole}"
        )


@dataclass(frozen=True)
class SplitFootprint:
    """Bytes of the weights of split layers, and of the optimizer's variables for them.

    Attributes:
        weights: number of the weights.
        whole: bytes of all parts, each once.
        own: bytes of the parts that a process has.
    """

    weights: int
    whole: int
    own: int

    def __str__(self) -> str:
        return (
            f"{self.weights} weight(s) are split. With the optimizer's variables for them, they take "
            f"{_size(self.whole)} in all, and {_size(self.own)} in each process."
        )


def split_footprint_of(dealing: Dealing) -> SplitFootprint:
    """Returns what split weights take.

    Args:
        dealing: how the optimizer's variables are dealt; all slots are known.
    """
    split = [variable for variable in dealing.updated if dealing.owner(variable).places]
    parts = [*split, *(slot for slot in dealing.slots if dealing.owner(slot).places)]
    whole = sum(prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in parts)
    return SplitFootprint(len(split), whole, max(dealing.nbytes(parts)))


def footprint_of(dealing: Dealing, at_once: bool = False) -> Footprint:
    """Returns what a divided optimizer takes.

    Args:
        dealing: how its variables are dealt; all slots are known.
        at_once: whether weights of which each process has some rows are gathered once in a step, and not twice.
    """
    split = [variable for variable in dealing.updated if dealing.owner(variable).places]
    others = [variable for variable in dealing.updated if not dealing.owner(variable).places]
    in_parts = dealing.nbytes(filter(dealing.is_in_parts, others))
    whole = dealing.nbytes(variable for variable in others if not dealing.is_in_parts(variable))
    # In a ring, each process sends all parts but one: gradients and values; values twice, where layers gather them.
    sent = 2 * (sum(whole) - min(whole)) + (2 if at_once else 3) * (sum(in_parts) - min(in_parts))
    for variable in split:  # the gradients of a part are summed over the processes that have copies
        copies = dealing.owner(variable).copies(dealing.processes)
        sent += 2 * max(dealing.nbytes([variable])) * (copies - 1) // copies
    return Footprint(
        sum(whole) + max(in_parts) + max(dealing.nbytes(split)),
        tuple(dealing.nbytes(dealing.slots)),
        sent,
        sum(in_parts),
        at_once and any(in_parts),
        bool(split),
    )


def planned(
    model: Any,
    processes: int,
    with_weights: bool = False,
    at_once: bool = False,
    split: Mapping[int, Ownership] | None = None,
) -> Footprint:
    """Returns what a model would take with its optimizer divided, without training it; allocates nothing.

    Args:
        model: a Keras model that is built, and compiled with an optimizer.
        processes: number of processes, at least 2.
        with_weights: whether large weights are kept in rows, too.
        at_once: whether those are gathered all at once, and once in a step.
        split: by id, the parts of the weights of split layers.

    Raises:
        ValueError: the model is not built, or has no optimizer; or an optimizer cannot be divided.
    """
    rows = {**(_rows(model, processes) if with_weights else {}), **(split or {})}
    dealings = [_planned(optimizer, processes, rows) for optimizer in _described(model)]
    footprints = [footprint_of(dealing, at_once) for dealing in dealings]
    return Footprint(
        sum(part.weights for part in footprints),
        tuple(map(sum, zip(*(part.slots for part in footprints), strict=True))),
        sum(part.sent for part in footprints),
        sum(part.in_parts for part in footprints),
        any(part.at_once for part in footprints),
        any(part.is_split for part in footprints),
    )


def planned_split(model: Any, processes: int, split: Mapping[int, Ownership]) -> SplitFootprint:
    """Returns what the split layers of a model would take, without training it; allocates nothing.

    Args:
        model: a Keras model that is built, and compiled with an optimizer.
        processes: number of processes.
        split: by id, the parts of their weights.

    Raises:
        ValueError: the model is not built, or has no optimizer; or that cannot update parts of weights.
    """
    dealings = [_planned(optimizer, processes, split, deals=False) for optimizer in _described(model)]
    footprints = list(map(split_footprint_of, dealings))
    return SplitFootprint(
        sum(part.weights for part in footprints),
        sum(part.whole for part in footprints),
        sum(part.own for part in footprints),
    )


def _described(model: Any) -> list[Any]:
    """Returns copies of the optimizers of a model that contain no others, built without allocating variables."""
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        raise ValueError(f"expected a model that is built, and compiled with an optimizer; got {model.name}")
    described_variables.install()
    copy = type(optimizer).from_config(optimizer.get_config())
    with described_variables.describing():
        copy.build(model.trainable_variables)
    return [part for part in contained([copy]) if len(contained([part])) == 1 and variables_of(part)]


def _rows(model: Any, processes: int) -> dict[int, Ownership]:
    """Returns the rows that each process would have of a model's weights, by id."""
    owners = {
        id(weight): weight_parts.owner_of_new(weight, processes)
        for weight in model.trainable_variables
        if weight.constraint is None and not weight.overwrite_with_gradient
    }
    return {key: owner for key, owner in owners.items() if owner is not None}


def _planned(optimizer: Any, processes: int, rows: Mapping[int, Ownership], deals: bool = True) -> Dealing:
    variables = variables_of(optimizer)
    own = {id(variable): rows[id(variable)] for variable in variables if id(variable) in rows}
    cuts = updates_elements_apart(optimizer)
    if own and not cuts:
        raise ValueError(f"the optimizer {optimizer.name} may look at whole weights, of which processes have rows")
    dealing = Dealing(variables, processes, 0, cuts, own, deals)
    strays = dealing.find_slots(optimizer)
    if strays or not dealing.is_complete:
        why = f"its variable {strays[0].path} belongs to no weight" if strays else f"{processes} processes are too many"
        raise ValueError(f"the optimizer {optimizer.name} cannot be divided: {why}")
    return dealing


def _size(nbytes: int) -> str:
    if nbytes < 1e3:
        return f"{nbytes} bytes"
    return f"{nbytes / 1e6:,.1f} MB" if nbytes >= 1e5 else f"{nbytes / 1e3:.1f} kB"
