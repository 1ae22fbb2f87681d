"""Where operations were executed, as TensorFlow reports it, not as they were asked for."""

import collections
import re
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import kernels

ROWS = 16
MARK = re.compile(r"tfdist_on_(CPU_\d)_end")
PASSING_ON = (
    *("_Arg", "_Retval", "_Send", "_Recv", "_HostRecv", "_HostSend", "Const", "NoOp", "Identity"),
    *("Enter", "Exit", "Merge", "Switch", "NextIteration", "LoopCond", "ReadVariableOp", "VariableShape"),
)
"""Kinds that compute nothing, by their beginnings."""


_SENDS = ("_Send", "_HostSend")


@dataclass(frozen=True)
class Executed:
    """An executed operation.

    Attributes:
        device: device of the operation, such as ``"CPU:1"``.
        kind: type of the operation.
        name: name of the operation, with its name scopes.
        receivers: the other devices that its results are sent to.
        types: types of its attributes, by name.
        inputs: names of the operations that it waits for, also on other devices.
    """

    device: str
    kind: str
    name: str
    receivers: frozenset[str] = frozenset()
    types: dict[str, int] = field(default_factory=dict, compare=False)
    inputs: frozenset[str] = field(default=frozenset(), compare=False)

    @property
    def is_elsewhere(self):
        """Whether it is neither where the innermost scope of its name wants it, nor only passes values on."""
        asked = MARK.findall(self.name)
        return bool(asked) and asked[-1].replace("_", ":") != self.device and not self.kind.startswith(PASSING_ON)

    @property
    def has_gpu_kernel(self):
        """Whether TensorFlow could run it on a GPU, without soft placement; only where it is built for GPUs."""
        registered = kernels.get_registered_kernels_for_op(self.kind.removeprefix("_Mkl")).kernel
        return any(
            all(
                constraint.name not in self.types or self.types[constraint.name] in constraint.allowed_values.list.type
                for constraint in kernel.constraint
            )
            for kernel in registered
            if kernel.device_type in ("GPU", "DEFAULT")
        )


def executed(function):
    """The operations of the graphs that a function runs, which have not run before; as they are built."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # which replaces operations
    context.context().enable_run_metadata()
    try:
        context.context().export_run_metadata()  # of what has run since the last time
        function()
        graphs = context.context().export_run_metadata().partition_graphs
    finally:
        context.context().disable_run_metadata()
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})
    sent = {node.attr["tensor_name"].s: node.name for graph in graphs for node in graph.node if node.op in _SENDS}
    return [operation for graph in graphs for operation in _of(graph, sent)]


def _of(graph, sent):
    receivers = collections.defaultdict(set)
    for node in graph.node:
        if node.op in _SENDS:
            receivers[node.input[0].partition(":")[0]].add(_short(node.attr["recv_device"].s.decode()))
    for node in graph.node:
        types = {name: value.type for name, value in node.attr.items() if value.type}
        inputs = {name.lstrip("^").partition(":")[0] for name in node.input}
        if node.op in ("_Recv", "_HostRecv"):
            inputs.add(sent[node.attr["tensor_name"].s])
        of_node = frozenset(receivers[node.name]), types, frozenset(inputs)
        yield Executed(_short(node.device), node.op, node.name, *of_node)


def _short(device):
    return device.rpartition("device:")[2]


def needed_by(operations, name):
    """The names of all operations that one waits for."""
    inputs = collections.defaultdict(set)
    for operation in operations:
        inputs[operation.name] |= operation.inputs
    needed, left = set(), [name]
    while left:
        new = inputs[left.pop()] - needed
        needed |= new
        left += new
    return needed


def places(operations, part):
    """How many operations with this part in their kind each device executed."""
    counts = {}
    for operation in operations:
        if part in operation.kind:
            counts[operation.device] = counts.get(operation.device, 0) + 1
    return counts


def train_step(model, *shape, outputs=1, inputs=1):
    """A function that makes one training step, on data of the given shape of a row.

    A model that is built gets its optimizer's variables now: where the step makes them, Keras traces it twice.
    """
    if model.built:
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    generator = np.random.default_rng(0)
    x = [generator.normal(size=(ROWS, *shape)).astype("float32") for _ in range(inputs)]
    y = generator.normal(size=(ROWS, outputs)).astype("float32")
    return lambda: model.train_on_batch(x if inputs > 1 else x[0], y)


def homes(variables):
    """The devices of variables."""
    return [variable.value.device.rpartition("device:")[2] for variable in variables]
