"""Floating-point operations of a TensorFlow graph, counted by its operations, their shapes, and loops' trip counts.

Multiplications and additions count one each, so that a product of matrices of m × k and k × n counts 2·m·k·n.
Elementwise operations, including exponentials, count one for each element of their output; reductions one for each
element of their input. Moving, casting and looking up values count nothing, nor does arithmetic on integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.private import graphs

_MOVES = frozenset(
    """Bitcast BroadcastTo Cast Concat ConcatV2 Const DepthToSpace DynamicPartition DynamicStitch Empty EmptyTensorList
    EnsureShape ExpandDims Fill Gather GatherNd GatherV2 Identity IdentityN InvertPermutation MirrorPad NoOp OneHot
    OnesLike Pack Pad PadV2 Placeholder PreventGradient RandomStandardNormal RandomUniform RandomUniformInt Range Rank
    ReadVariableOp Reshape ResourceGather ReverseSequence ReverseV2 ScatterNd Select SelectV2 Shape Size Slice
    SpaceToBatchND BatchToSpaceND SpaceToDepth Split SplitV Squeeze StatelessRandomGetKeyCounter
    StatelessRandomNormalV2 StatelessRandomUniformV2 StopGradient StridedSlice TensorListFromTensor TensorListGetItem
    TensorListReserve TensorListSetItem TensorListStack TensorListPushBack TensorListPopBack TensorScatterUpdate Tile
    Transpose Unpack Where ZerosLike""".split()
)
_OF_INPUTS = frozenset("ArgMax ArgMin Cumprod Cumsum EuclideanNorm L2Loss Max Mean Min Prod Sum TopKV2".split())
_FLOPS_PER_ELEMENT = {"FusedBatchNormV3": 4, "Softmax": 5, "LogSoftmax": 5}
"""Operations for each element of the output, by type of operation; 1 for other types."""


class UnknownShapeError(ValueError):
    """Error for an operation's shape or a loop's trip count that is known at run time only."""


def flops(graph: Any) -> int:
    """Counts the floating-point operations of one run of a graph.

    Args:
        graph: graph of a concrete function with known shapes.

    Raises:
        UnknownShapeError: a shape or a trip count is unknown.
    """
    return sum(_operation_flops(operation) for operation in _needed(graph))


def _needed(graph: Any) -> list[Any]:
    """Returns the operations that outputs need; Keras makes others to learn shapes."""
    left = [tensor.op for tensor in graph.outputs] + list(graph.control_outputs)
    needed: dict[str, Any] = {}
    while left:
        operation = left.pop()
        if operation.name not in needed:
            needed[operation.name] = operation
            left += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    return list(needed.values())


def _operation_flops(operation: Any) -> int:
    kind = operation.type
    if kind in _MOVES:
        return 0
    if kind in ("While", "StatelessWhile"):
        return _trips(operation) * flops(_function(operation, "body"))
    if kind in ("If", "StatelessIf", "Case", "StatelessCase"):
        return max(flops(branch) for branch in _branches(operation))
    if kind in ("PartitionedCall", "StatefulPartitionedCall"):
        return flops(_function(operation, "f"))
    if not any(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in operation.outputs):
        return 0
    if (count := _PRODUCTS.get(kind)) is not None:
        return count(operation)
    elements = _elements(operation.inputs[0] if kind in _OF_INPUTS else operation.outputs[0])
    return _FLOPS_PER_ELEMENT.get(kind, 1) * elements


def _elements(tensor: Any) -> int:
    if not tensor.shape.is_fully_defined():
        raise UnknownShapeError(f"the shape of {tensor.name}, {tensor.shape}, is known at run time only")
    return int(tensor.shape.num_elements())


def _trips(loop: Any) -> int:
    """Returns the largest trip count of a loop: if there is a bound, TensorFlow passes it after the counter."""
    bound = _static(loop.inputs[1])
    if bound is None or bound < 0:
        raise UnknownShapeError(f"how often the loop {loop.name} runs is known at run time only")
    return int(bound)


def _static(tensor: Any) -> Any:
    """Returns the value of a tensor that does not depend on the graph's inputs; None if it does."""
    value = tf.get_static_value(tensor)
    operation = tensor.op
    if value is not None or operation.type not in ("StridedSlice", "Max", "Minimum", "Cast", "Identity"):
        return value
    inputs = [_static(operand) for operand in operation.inputs]
    if any(operand is None for operand in inputs):
        return None
    match operation.type:
        case "StridedSlice":
            begin, _, strides = (operand.tolist() for operand in inputs[1:])
            if operation.get_attr("shrink_axis_mask") != 1 or strides != [1]:
                return None
            return inputs[0][begin[0]]
        case "Max":
            return inputs[0].max()
        case "Minimum":
            return min(inputs)
        case _:
            return inputs[0]


def _function(operation: Any, attribute: str) -> Any:
    return _graph(operation, operation.get_attr(attribute).name)


def _branches(operation: Any) -> Iterator[Any]:
    if "branches" in operation.node_def.attr:
        names = [branch.name for branch in operation.get_attr("branches")]
    else:
        names = [operation.get_attr(attribute).name for attribute in ("then_branch", "else_branch")]
    return (_graph(operation, name) for name in names)


def _graph(operation: Any, name: str) -> Any:
    graph = operation.graph
    while graph is not None:
        function = graphs.function_of(graph, name)
        if function is not None:
            return function.graph
        graph = getattr(graph, "outer_graph", None)
    raise UnknownShapeError(f"the function {name} of {operation.name} has no graph")


def _matrices(operation: Any) -> int:
    transposed = "transpose_a" if operation.type == "MatMul" else "adj_x"
    inner = operation.inputs[0].shape[-2 if operation.get_attr(transposed) else -1]
    if inner is None:
        raise UnknownShapeError(f"the shape of {operation.inputs[0].name} is known at run time only")
    return 2 * inner * _elements(operation.outputs[0])


def _convolution(operation: Any) -> int:
    *window, inputs, _ = operation.inputs[1].shape
    return 2 * math.prod(window) * inputs * _elements(operation.outputs[0])


def _depthwise(operation: Any) -> int:
    return 2 * math.prod(operation.inputs[1].shape[:-2]) * _elements(operation.outputs[0])


def _transposed_convolution(operation: Any) -> int:
    *window, outputs, _ = operation.inputs[1].shape
    return 2 * math.prod(window) * outputs * _elements(operation.inputs[2])


def _pool(operation: Any) -> int:
    return math.prod(operation.get_attr("ksize")) * _elements(operation.outputs[0])


def _einsum(operation: Any) -> int:
    """Counts two operations for each combination of labels, or one if there is only one operand."""
    equation = operation.get_attr("equation").decode()
    sizes: dict[str, int] = {}
    for labels, tensor in zip(equation.partition("->")[0].split(","), operation.inputs, strict=True):
        before, _, behind = labels.partition("...")
        shape = [1 if size is None else size for size in tensor.shape]
        _elements(tensor)
        sizes.update(zip(before, shape, strict=False))
        sizes.update(zip(reversed(behind), reversed(shape), strict=False))
        middle = shape[len(before) : len(shape) - len(behind)]
        sizes["..."] = max(sizes.get("...", 1), math.prod(middle))
    return (2 if len(operation.inputs) > 1 else 1) * math.prod(sizes.values())


_PRODUCTS: dict[str, Callable[[Any], int]] = {
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matrices),
    **dict.fromkeys(("Conv2D", "Conv3D", "Conv3DV2"), _convolution),
    "DepthwiseConv2dNative": _depthwise,
    **dict.fromkeys(("Conv2DBackpropInput", "Conv3DBackpropInputV2"), _transposed_convolution),
    **dict.fromkeys(("AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D", "MaxPoolV2"), _pool),
    "Einsum": _einsum,
}
