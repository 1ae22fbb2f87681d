"""Logs that a step computes from results of metrics, such as an F1 score from a precision and a recall.

Their value over all replicas is computed from the results over all replicas, by a copy of the step's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

Source = tuple[Any, Any]
"""A metric, and the path of a tensor in its result."""


class DerivedLog(NamedTuple):
    """A log that a step computes from results of metrics alone.

    Attributes:
        sources: the results that it is computed from.
        compute: function of tensors like these results, in their order, that returns the log; in a graph or eagerly.
    """

    sources: Sequence[Source]
    compute: Callable[..., tf.Tensor]


def derived(log: Any, whose: Callable[[tf.Tensor], Source | None]) -> DerivedLog | None:
    """Returns how a log is computed from results of metrics; None if it is not, or from other values, too.

    Args:
        log: a tensor of the graph under construction; from an eager tensor nothing is known of its operations.
        whose: function of a tensor that returns what it is a result of, or None.
    """
    if not tf.is_symbolic_tensor(log):
        return None
    results: dict[tuple[str, int], Source] = {}
    operations: dict[str, tf.Operation] = {}
    ahead = [log.op]
    while ahead:
        operation = ahead.pop()
        if operation.name in operations:
            continue
        is_pure = bool(operation.inputs) or operation.type == "Const"
        if operation.op_def.is_stateful or not is_pure or _calls_functions(operation):
            return None
        operations[operation.name] = operation
        for tensor in operation.inputs:
            source = whose(tensor)
            if source is None:
                ahead.append(tensor.op)
            else:
                results[tensor.op.name, tensor.value_index] = source
    return DerivedLog(list(results.values()), _copied(operations.values(), list(results), log)) if results else None


def _calls_functions(operation: tf.Operation) -> bool:
    return any(attribute.HasField("func") for attribute in operation.node_def.attr.values())


def _copied(
    operations: Iterable[tf.Operation], results: Sequence[tuple[str, int]], log: tf.Tensor
) -> Callable[..., tf.Tensor]:
    definition = tf.compat.v1.GraphDef()
    definition.versions.CopyFrom(log.graph.graph_def_versions)
    for operation in operations:
        node = definition.node.add()
        node.CopyFrom(operation.node_def)
        node.input[:] = [name for name in node.input if not name.startswith("^")]
        node.device = ""
        node.attr.pop("_class", None)  # operations that it is placed with
    output = f"{log.op.name}:{log.value_index}"
    names, shape = [f"{name}:{index}" for name, index in results], log.shape

    @tf.function(autograph=False)
    def compute(*given: tf.Tensor) -> tf.Tensor:
        (copy,) = tf.graph_util.import_graph_def(
            definition, input_map=dict(zip(names, given, strict=True)), return_elements=[output], name="log"
        )
        return tf.ensure_shape(copy, shape)

    return compute
