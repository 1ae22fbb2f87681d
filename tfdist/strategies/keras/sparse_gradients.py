"""Tells whether the rows of a sparse gradient depend on the samples, or are the same on every replica.

The gradient of an embedding that looks up words has rows for each sample: in one process it would have the rows of all
replicas, concatenated. With an embedding that looks up positions, such as ``range(16)``, every replica has the same
rows: in one process they would occur once, with the sum over all samples. Optimizers that square gradients treat the
two differently, so gradients of the first kind are gathered and those of the second are summed.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def are_of_samples(slices: tf.IndexedSlices) -> bool:
    """Returns whether the indices may depend on the batch, according to the graph; True without a graph.

    Args:
        slices: a gradient, in the replica's own graph.
    """
    if not tf.is_symbolic_tensor(slices.indices):
        return True
    graph = slices.indices.graph
    captures = getattr(graph, "captures", ())
    constants = {id(inside) for outside, inside in captures if not tf.is_symbolic_tensor(outside)}
    seen: set[str] = set()
    pending = [slices.indices]
    while pending:
        tensor = pending.pop()
        operation = tensor.op
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type in ("Placeholder", "PlaceholderWithDefault"):
            if id(tensor) not in constants:
                return True
        elif operation.type in _OPAQUE:
            return True
        elif operation.type == "Reshape":
            pending.append(operation.inputs[0])  # the gradient of a gather flattens its indices
        elif operation.type in ("Shape", "Size", "ShapeN"):
            return True  # the shape contains the number of samples
        elif not _is_of_another_dimension(operation):
            pending += operation.inputs
    return False


_OPAQUE = ("If", "While", "StatelessIf", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall", "EagerPyFunc",
           "PyFunc", "IteratorGetNext", "OptionalGetValue", "ReadVariableOp")  # fmt: skip


def _is_of_another_dimension(operation: Any) -> bool:
    """Returns whether an operation reads one dimension of a shape, but not the first, which counts samples."""
    if operation.type != "StridedSlice" or operation.inputs[0].op.type != "Shape":
        return False
    begin = tf.get_static_value(operation.inputs[1])
    return begin is not None and len(begin) == 1 and int(begin[0]) != 0 and bool(operation.get_attr("shrink_axis_mask"))
