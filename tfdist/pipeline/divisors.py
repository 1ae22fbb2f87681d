"""Divisors of a whole batch's losses, computed before any micro-batch has passed through all stages.

A loss over the valid steps of a mask, or weighted by samples, divides by a sum over the batch. The sum over a
micro-batch is another one, so the mean over micro-batches would not be the loss of the batch. Masks and sample weights
do not depend on the model's weights. Therefore the loss is traced once with stand-in outputs, and only the part of its
graph that computes the divisors is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.pipeline.stages import Stages
from tfdist.private.keras import backend, tree
from tfdist.strategies.abilities import DataParallel
from tfdist.strategies.keras import keras_losses


def divisors_of(
    stages: Stages, data: Any, inputs: Sequence[tf.Tensor], loss: Callable[[Any, list[Any]], tf.Tensor]
) -> list[tf.Tensor]:
    """Computes the divisors of a loss, in the order in which the loss uses them.

    Args:
        stages: the model's stages.
        data: data of the batch, in any structure.
        inputs: the model's inputs, in their order.
        loss: computes the loss from data and the model's outputs.

    Returns:
        Float64 scalars.

    Raises:
        ValueError: a mask of the model's outputs depends on weights.
    """
    noted: list[tf.Tensor] = []
    parts = [*inputs, *(tensor for tensor in tree.flatten(data) if tf.is_tensor(tensor))]

    def trace(*tensors: tf.Tensor) -> list[tf.Tensor]:
        given = iter(tensors)
        own_inputs = [next(given) for _ in inputs]
        own_data = tree.map_structure(lambda leaf: next(given) if tf.is_tensor(leaf) else leaf, data)
        outputs = _standing_in(stages, own_inputs, own_data)
        with backend.StatelessScope(), keras_losses.noting_divisors() as divisors:
            loss(own_data, outputs)
        noted.extend(divisors)
        return list(divisors)

    function = tf.compat.v1.wrap_function(trace, [tf.type_spec_from_value(tensor) for tensor in parts])
    return list(function(*parts)) if noted else []


def over_replicas(divisors: Sequence[tf.Tensor], extended: DataParallel | None) -> list[tf.Tensor]:
    """Sums divisors over replicas.

    Args:
        divisors: divisors of this replica's batch.
        extended: the `extended` of the calling replica's strategy; None if there is only one replica.
    """
    if extended is None or not divisors:
        return list(divisors)
    total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.stack(list(divisors)))
    return tf.unstack(total, len(divisors))


def _standing_in(stages: Stages, inputs: Sequence[tf.Tensor], data: Any) -> list[Any]:
    """Returns stand-ins for the model's outputs, with their masks and, if known, shapes; values do not matter."""
    calls = stages.calls
    masks: dict[int, Any] = {}
    if any(stages.has_mask(key) for key in calls.outputs):
        layers = [layer for stage in range(stages.count) for layer in stages.layers(stage)]
        state = [
            (variable, tf.zeros(variable.shape, variable.dtype)) for layer in layers for variable in layer.variables
        ]
        values = dict(zip(calls.inputs, inputs, strict=True))
        with backend.StatelessScope(state_mapping=state, collect_losses=True):
            calls.run(calls.calls, values, False)
        masks = {key: backend.get_keras_mask(values[key]) for key in calls.outputs if stages.has_mask(key)}
        _check(masks.values(), {value.op.name for _, value in state})
    stand_ins = []
    for key in calls.outputs:
        tensor = calls.tensors[key]
        shape = [_size(axis, size, [*tree.flatten(data), *inputs]) for axis, size in enumerate(tensor.shape)]
        value = tf.compat.v1.placeholder_with_default(tf.zeros(shape, tensor.dtype), tensor.shape)
        if masks.get(key) is not None:
            backend.set_keras_mask(value, masks[key])
        stand_ins.append(value)
    return stand_ins


def _size(axis: int, size: int | None, like: Sequence[Any]) -> Any:
    """Returns the size of an axis of an output; an open size is taken from targets or inputs, and may be wrong."""
    if size is not None:
        return size
    for tensor in like:
        if isinstance(tensor, tf.Tensor) and tensor.shape.rank is not None and tensor.shape.rank > axis:
            return tf.shape(tensor)[axis]
    return 1


def _check(masks: Iterable[Any], weights: set[str]) -> None:
    """Checks that masks do not depend on weights.

    Raises:
        ValueError: a mask depends on weights.
    """
    pending, seen = [mask.op for mask in masks], set[str]()
    while pending:
        operation = pending.pop()
        if operation.name in weights:
            raise ValueError(
                "a mask of the model's outputs depends on weights: with this schedule, the number of its valid steps "
                'in the whole batch is not known when the first loss is computed. Use schedule="gpipe".'
            )
        if operation.name not in seen:
            seen.add(operation.name)
            pending += [tensor.op for tensor in operation.inputs]
