"""What an optimizer that is divided among processes takes in memory, and what its steps send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras

from tfdist.private.optimizers import variables_of
from tfdist.strategies.divided import described_variables
from tfdist.strategies.divided.dealing import Dealing, contained, cuts


@dataclass(frozen=True)
class Footprint:
    """Bytes of a model that is trained by processes of which each updates some of the weights.

    Attributes:
        weights: bytes of the weights, which each process has whole; their gradients take as many.
        slots: by rank, bytes of the variables that the optimizer keeps there for weights.
        sent: bytes that a process sends in a step with dense gradients, at most.
    """

    weights: int
    slots: tuple[int, ...]
    sent: int

    def __str__(self) -> str:
        return (
            f"Its variables for weights take {_mb(sum(self.slots))} in all, and at most {_mb(max(self.slots))} in each "
            f"of {len(self.slots)} processes. Each process has the weights and gradients, of {_mb(self.weights)} each, "
            f"and sends up to {_mb(self.sent)} in a step."
        )


def footprint_of(dealing: Dealing) -> Footprint:
    """Returns what a divided optimizer takes.

    Args:
        dealing: how its variables are dealt; all slots are known.
    """
    weights, slots = dealing.nbytes(dealing.updated), dealing.nbytes(dealing.slots)
    sent = 2 * (sum(weights) - min(weights))  # in a ring: all parts but one each way
    whole = sum(weights)
    return Footprint(whole, tuple(slots), sent)


def planned(model: Any, processes: int) -> Footprint:
    """Returns what a model would take with its optimizer divided, without training it; allocates nothing.

    Args:
        model: a Keras model that is built, and compiled with an optimizer.
        processes: number of processes, at least 2.

    Raises:
        ValueError: the model is not built, or has no optimizer; or an optimizer cannot be divided.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not model.built:
        raise ValueError(f"expected a model that is built, and compiled with an optimizer; got {model.name}")
    described_variables.install()
    copy = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    with described_variables.describing():
        copy.build(model.trainable_variables)
    footprints = [
        _planned(part, processes) for part in contained([copy]) if len(contained([part])) == 1 and variables_of(part)
    ]
    return Footprint(
        sum(part.weights for part in footprints),
        tuple(map(sum, zip(*(part.slots for part in footprints), strict=True))),
        sum(part.sent for part in footprints),
    )


def _planned(optimizer: Any, processes: int) -> Footprint:
    dealing = Dealing(variables_of(optimizer), processes, 0, cuts(optimizer))
    strays = dealing.find_slots(optimizer)
    if strays or not dealing.is_complete:
        why = f"its variable {strays[0].path} belongs to no weight" if strays else f"{processes} processes are too many"
        raise ValueError(f"the optimizer {optimizer.name} cannot be divided: {why}")
    return footprint_of(dealing)


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
