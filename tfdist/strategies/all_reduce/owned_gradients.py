"""Sums over processes of gradients, of which each process gets those of its own variables and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.engine import precision
from tfdist.private import tensorflow as private
from tfdist.sharding import Ownership
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import DealsVariables


def own_sums(
    extended: DealsVariables, gradients: list[Any], variables: Sequence[Any], owners: Sequence[Ownership], rank: int
) -> list[Any]:
    """Returns the sums over processes of the gradients of this process's own variables and rows.

    Rows of sparse gradients are gathered on all processes; outside of `Strategy.run` they are made dense.
    """
    sharing = current_strategy.sharing()
    weight = None if sharing is None else sharing.shares.weight()
    replica = tf.distribute.get_replica_context()
    runs = replica is not None and replica.strategy.extended is extended
    sums: dict[int, Any] = {}
    dense = []
    for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
        if isinstance(gradient, tf.IndexedSlices) and runs:
            options = private.WeighedOptions((None,), weight)
            total = replica.all_reduce(tf.distribute.ReduceOp.SUM, [gradient], options)[0]
            sums[place] = rows_of(total, owners[place], rank)
            continue
        gradient = gradients[place] = tf.convert_to_tensor(gradient)
        if tf.is_symbolic_tensor(gradient):
            gradient.set_shape(variable.shape)
        dense.append(place)
    dense.reverse()  # the last layer's gradient is ready first
    given = [gradients[place] for place in dense]
    terms = precision.widened(given) if extended.float32_sums else given
    names = [name_of(variables[place]) for place in dense]
    own = [place for place in dense if owners[place].includes(rank)]
    totals = extended.owned.sums(terms, [owners[place] for place in dense], names, weight) if terms else []
    sums.update(zip(own, precision.narrowed(totals, [gradients[place] for place in own]), strict=True))
    return [sums[place] for place, owner in enumerate(owners) if owner.includes(rank)]


def rows_of(gradient: Any, owner: Ownership, rank: int) -> Any:
    """Returns a process's part of a gradient, if it has some."""
    if owner.owner is not None or not owner.includes(rank):
        return gradient
    rows = owner.rows(rank)
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient[rows]
    own = tf.where((gradient.indices >= rows.start) & (gradient.indices < rows.stop))[:, 0]
    indices = tf.gather(gradient.indices, own) - rows.start
    shape = tf.concat([tf.cast([rows.stop - rows.start], gradient.dense_shape.dtype), gradient.dense_shape[1:]], 0)
    return tf.IndexedSlices(tf.gather(gradient.values, own), indices, shape)


def name_of(variable: Any) -> str:
    """Returns the name of a variable of Keras or TensorFlow, for messages."""
    return str(getattr(variable, "path", variable.name))
