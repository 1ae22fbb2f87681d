"""Graphs of TensorFlow's functions: what is in them, the order of what they run, and gradients in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.private.tensorflow import backprop, control_flow_util, control_flow_v2_func_graphs, pywrap_tfe, record


def function_of(graph: Any, name: str) -> Any:
    """Returns the function of this name that a graph calls; None if the graph has none."""
    return graph._functions.get(name)


def is_called(graph: Any, outer: Any) -> bool:
    """Returns whether an operation of ``outer`` calls a function's graph, or one of its branches or loops."""
    return any(getattr(function, "graph", None) is graph for function in outer._functions.values())


def is_compiled_by_xla() -> bool:
    """Returns whether XLA compiles the graph under construction."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def captured(graph: Any, tensor: Any) -> Any:
    """Returns the tensor by which the graph of a function knows a tensor from outside."""
    return graph.capture(tensor)


def unordered(tensor: Any) -> Any:
    """Returns a stateful operation's tensor, which TensorFlow then does not order among other stateful operations.

    In functions, it runs those that use no resource, such as `tf.timestamp`, one after another, as they were traced;
    see `tfdist.engine.call_order` for those that wait for other processes.

    Args:
        tensor: a tensor that was just made.
    """
    manager = None if tf.executing_eagerly() else tensor.graph.experimental_acd_manager
    if manager is not None:
        manager.run_independently(tensor.op)
    return tensor


def keeps_order(graph: Any) -> bool:
    """Returns whether the stateful operations of a graph under construction will run in their order."""
    return graph.experimental_acd_manager is not None


def is_branch_or_loop(graph: Any) -> bool:
    """Returns whether a graph is the branch of a conditional, or the condition or body of a loop."""
    return isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph)


_BACKWARD = "TfdistBackward"
"""Name under which operations have a gradient that is a Python function."""


_FUNCTIONS = "_tfdist_backward"
"""Attribute of a graph: those functions, by the names of the operations."""


def with_gradient(
    outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], backward: Callable[..., list[Any]]
) -> list[tf.Tensor]:
    """Gives tensors a gradient that is a Python function, also for a tape around the function under construction.

    Unlike `tf.custom_gradient` it takes and returns `tf.IndexedSlices`, and nothing outlives the graph.

    Args:
        outputs: the tensors; what they were computed by is not recorded.
        inputs: tensors that they are a function of.
        backward: returns the gradients by the inputs for those by the outputs.

    Returns:
        The outputs, with the gradient.
    """
    given = [*outputs, *inputs]
    if tf.executing_eagerly():
        made = list(outputs)
    else:
        graph = tf.compat.v1.get_default_graph()
        with record.stop_recording(), graph.gradient_override_map({"IdentityN": _BACKWARD}):
            named = tf.identity_n(given)
        made = named[: len(outputs)]
        functions = getattr(graph, _FUNCTIONS, {})
        setattr(graph, _FUNCTIONS, functions)
        functions[named[0].op.name] = lambda *gradients: [None] * len(outputs) + backward(*gradients[: len(outputs)])
    record.record_operation("tfdist_backward", made, list(inputs), backward)
    return made


@tf.RegisterGradient(_BACKWARD)
def _backward(operation: Any, *gradients: Any) -> Any:
    return getattr(operation.graph, _FUNCTIONS)[operation.name](*gradients)


def replace_gradient_function(seam: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the function by which tapes make the gradient of an operation.

    Args:
        seam: function that makes the replacement from the original, whose last argument is the name scope of the
            forward pass.
    """
    pywrap_tfe.TFE_Py_RegisterGradientFunction(seam(backprop._gradient_function))


def replace_recording(seam: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces the function by which tapes record a gradient that is a Python function.

    Args:
        seam: function that makes the replacement from the original ``record_operation``.
    """
    record.record_operation = seam(record.record_operation)
