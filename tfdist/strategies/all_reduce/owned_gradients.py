"""Sums over processes of gradients, of which each process gets those of its own variables and rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.compression.compressor import Compressed
from tfdist.engine import precision
from tfdist.private import tensorflow as private
from tfdist.private.optimizers import key_of
from tfdist.sharding import EVERYONE, Ownership
from tfdist.strategies import current_strategy
from tfdist.strategies.divided_abilities import DealsVariables


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
    sparse = [place for place, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices) and runs]
    if sparse:
        options = private.WeighedOptions((None,) * len(sparse), weight)
        totals = replica.all_reduce(tf.distribute.ReduceOp.SUM, [gradients[place] for place in sparse], options)
        sums.update((place, rows_of(total, owners[place], rank)) for place, total in zip(sparse, totals, strict=True))
    dense = [place for place in range(len(gradients)) if place not in sparse]
    for place in dense:
        gradient = gradients[place] = tf.convert_to_tensor(gradients[place])
        if tf.is_symbolic_tensor(gradient):
            gradient.set_shape(variables[place].shape)
    dense.reverse()  # the last layer's gradient is ready first
    of_all = [place for place in dense if owners[place] == EVERYONE or owners[place].places]
    dealt = [place for place in dense if place not in of_all]
    own = [place for place in dealt if owners[place].includes(rank)]

    def terms(places: list[int]) -> tuple[list[tf.Tensor], list[str]]:
        given = [gradients[place] for place in places]
        names = [name_of(variables[place]) for place in places]
        return precision.widened(given) if extended.float32_sums else given, names

    def compressed(given: list[tf.Tensor], places: list[int]) -> list[Compressed | None]:
        if extended.compressor is None:
            return [None] * len(places)
        of = {key_of(variables[place]): variables[place] for place in places}
        extended.compressor.register({key: (name_of(one), tuple(one.shape)) for key, one in of.items()})
        return [extended.compressor.tensor(key, gradient) for key, gradient in zip(of, given, strict=True)]

    def keep(places: list[int], totals: list[tf.Tensor]) -> None:
        sums.update(zip(places, precision.narrowed(totals, [gradients[place] for place in places]), strict=True))

    if of_all:
        given, names = terms(of_all)
        totals = extended.bridge.all_reduce(
            given, names=names, compressed=compressed(given, of_all), weight=weight, in_memory=True
        )
        keep(of_all, [rows_of(total, owners[place], rank) for place, total in zip(of_all, totals, strict=True)])
    if dealt:
        given, names = terms(dealt)
        of_dealt = [owners[place] for place in dealt]
        keep(own, extended.owned.sums(given, of_dealt, names, weight, compressed(given, dealt)))
    return [sums[place] for place, owner in enumerate(owners) if owner.includes(rank)]


def rows_of(gradient: Any, owner: Ownership, rank: int) -> Any:
    """Returns a process's part of a gradient, if it has some."""
    if not owner.is_cut:
        return gradient
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient[owner.part(rank)]
    (rows,) = owner.part(rank)
    own = tf.where((gradient.indices >= rows.start) & (gradient.indices < rows.stop))[:, 0]
    indices = tf.gather(gradient.indices, own) - rows.start
    shape = tf.concat([tf.cast([rows.stop - rows.start], gradient.dense_shape.dtype), gradient.dense_shape[1:]], 0)
    return tf.IndexedSlices(tf.gather(gradient.values, own), indices, shape)


def name_of(variable: Any) -> str:
    """Returns the name of a variable of Keras or TensorFlow, for messages."""
    return str(getattr(variable, "path", variable.name))
