"""Weights of which each process keeps a part, and no process keeps all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist import sharding
from tfdist.private import tensorflow as private
from tfdist.private.models import shaped, value_of
from tfdist.sharding import Ownership
from tfdist.strategies.divided import described_variables

if TYPE_CHECKING:
    from tfdist.strategies.divided.gathering import Collectives

_PART = "_tfdist_weight_part"
"""Attribute of a Keras variable: its `WeightPart`."""


class _InParts(keras.Variable):
    """A Keras variable of which each process keeps a part. Tapes take its gradient by that."""

    @property
    def handle(self) -> Any:
        """The handle of this process's part."""
        return getattr(self, _PART).copy.handle


class WeightPart:
    """This process's part of a weight.

    Args:
        variable: the weight, a Keras variable.
        owner: the part of each process.
        rank: rank of this process.
        part: this process's part, as the value of a Keras variable.
        collectives: collectives of the weights.

    Attributes:
        variable: as given.
        owner: as given.
        index: index of this process's part.
        part: as given.
        collectives: as given.
    """

    def __init__(self, variable: Any, owner: Ownership, rank: int, part: Any, collectives: Collectives) -> None:
        self.variable = variable
        self.owner = owner
        self.index = owner.part(rank)
        self.part = part
        self.collectives = collectives

    def leave(self) -> None:
        """Frees the memory of the whole weight."""
        described_variables.leave(
            self.variable,
            described_variables.IN_PARTS,
            lambda _: self.collectives.read(self),
            lambda _, value: self.collectives.assign(self, value),
        )

    @property
    def copy(self) -> Any:
        """The part as a `tf.Variable`."""
        return private.copies(self.part)[0]

    @property
    def spec(self) -> tf.TensorSpec:
        """Shape and dtype of the whole weight."""
        return tf.TensorSpec(self.variable.shape, self.part.dtype)

    def assign(self, value: Any) -> None:
        """Assigns this process's part of a value of the whole weight."""
        self.copy.assign(tf.cast(value[self.index], self.part.dtype), read_value=False)


def is_large(variable: Any) -> bool:
    """Returns whether a weight is so large that it is worth keeping in rows.

    Args:
        variable: a Keras variable, whose value need not exist.
    """
    nbytes = sharding.Variable(tuple(variable.shape), tf.as_dtype(variable.dtype).size).nbytes
    return nbytes > sharding.SPLIT_BYTES


def owner_of_new(variable: Any, processes: int, divides: Callable[[Any], bool] = is_large) -> Ownership | None:
    """Returns the rows of a new weight that each process keeps; None if each keeps the whole weight.

    Args:
        variable: a Keras variable, whose value need not exist.
        processes: number of processes.
        divides: function that tells whether a weight is kept in rows, if it can be.
    """
    rows = variable.shape[0] if len(variable.shape) else 0
    if not divides(variable) or processes == 1 or not tf.as_dtype(variable.dtype).is_floating or rows < processes:
        return None
    return Ownership(None, sharding.even_bounds(rows, processes))


def of(variable: Any) -> WeightPart | None:
    """Returns this process's part of a weight; None if the process has all of it.

    Args:
        variable: a variable of Keras or TensorFlow.
    """
    return getattr(variable, _PART, None)


def source_of(variable: Any) -> Any:
    """Returns what tapes take the gradient of a weight by: its value, or that of this process's part of it.

    Args:
        variable: a Keras variable.
    """
    kept = of(variable)
    return variable.value if kept is None else kept.copy


def only_parts(variables: Iterable[Any]) -> AbstractContextManager[None]:
    """Returns a context in which weights are only this process's parts: reading and assigning them sends nothing.

    Args:
        variables: variables of Keras, some perhaps several times; those of which the process has all stay as they are.
    """
    kept = {id(found): found for variable in variables if (found := of(variable)) is not None}
    return described_variables.standing_in([(part.variable, part.index, part.part) for part in kept.values()])


def not_exported(variable: Any) -> ValueError:
    """Returns the error for the export of a model that has a weight in parts.

    Args:
        variable: the weight.
    """
    return ValueError(
        f"export: no process has all of the weight {variable.path}. Save the model, load it outside of the scope, and "
        "export that."
    )


def is_part(gradient: Any, variable: Any) -> bool:
    """Returns whether a gradient is that of this process's part, and not of a whole weight.

    Args:
        gradient: gradient by a variable, dense or sparse.
        variable: a variable of Keras or TensorFlow.
    """
    kept = of(variable)
    if kept is None:
        return False
    return isinstance(gradient, tf.IndexedSlices) or tf.TensorShape(gradient.shape) == tf.TensorShape(kept.part.shape)


def keep(
    variable: Any,
    value: tf.Tensor,
    owner: Ownership,
    rank: int,
    make: Callable[[Any], None],
    collectives: Collectives,
) -> None:
    """Gives a new variable this process's part of its initial value.

    Args:
        variable: a Keras variable without a value.
        value: initial value of the whole variable.
        owner: the part of each process.
        rank: rank of this process.
        make: function that allocates the variable by an initializer; its shape is that of the part then.
        collectives: collectives of the weights.
    """
    # Copied: TensorFlow's rows of a tensor share its memory, and would keep all of it.
    own = tf.constant(np.array(value.numpy()[owner.part(rank)]))
    described_variables.describe(variable)
    with shaped(variable, tuple(own.shape)):
        make(lambda shape, dtype=None: own)
    kept = WeightPart(variable, owner, rank, value_of(variable), collectives)
    setattr(variable, _PART, kept)
    variable.__class__ = _InParts
    kept.leave()
