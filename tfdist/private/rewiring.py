"""Private members of TensorFlow's operations: changes of a graph that is under construction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_OF_ONE = frozenset(("Cast", "Identity", "Reshape", "Transpose", "ExpandDims", "Squeeze"))
"""Operations that are made again, as they need nothing but a tensor and constants."""
_READING = frozenset(("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "Identity"))


def is_younger(operation: Any, than: Any) -> bool:
    """Returns whether an operation was added to its graph after another one."""
    return bool(operation._id > than._id)


def is_written_since(handle: Any, operation: Any) -> bool:
    """Returns whether a variable may be assigned a value after an operation of a graph under construction.

    Args:
        handle: handle of the variable, in the graph.
        operation: an operation of the graph.
    """
    users = handle.consumers()
    return any(user.type not in _READING and is_younger(user, operation) for user in users)


def redirect(tensor: Any, to: Any, since: Any) -> None:
    """Has the operations that were added since some operation use another tensor in place of one.

    Casts and reshapes of the tensor that were made before, and are used since then, are made again.

    Args:
        tensor: tensor of a graph under construction.
        to: tensor of the same value; it does not depend on what is redirected.
        since: the oldest operation on which `to` depends and `tensor` does not.
    """
    for consumer in list(tensor.consumers()):
        if is_younger(consumer, since):
            for index, given in enumerate(consumer.inputs):
                if given is tensor and consumer is not to.op:
                    consumer._update_input(index, to)
        elif consumer.type in _OF_ONE and any(is_younger(user, since) for user in _users(consumer)):
            redirect(consumer.outputs[0], _made_again(consumer, tensor, to), since)


def _users(operation: Any) -> Iterator[Any]:
    """Yields the operations that depend on an operation by way of operations that are made again."""
    for consumer in operation.outputs[0].consumers():
        yield consumer
        if consumer.type in _OF_ONE:
            yield from _users(consumer)


def _made_again(operation: Any, tensor: Any, to: Any) -> Any:
    inputs = [to if given is tensor else given for given in operation.inputs]
    made = operation.graph._create_op_internal(
        operation.type,
        inputs,
        dtypes=[output.dtype for output in operation.outputs],
        attrs=dict(operation.node_def.attr),
        op_def=operation.op_def,
    )
    return made.outputs[0]
