"""`tfdist.replicate`: a model that divides each batch over devices of this process, as `multi_gpu_model` of old."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.model_parallel import keras_placement, placed_variables
from tfdist.model_parallel.device_scope import device_scope
from tfdist.model_parallel.model_calls import ModelCalls, graph_of
from tfdist.strategies import device_names
from tfdist.strategies.keras_private import tree

_CPU = "/device:CPU:0"


@keras.saving.register_keras_serializable(package="tfdist")
class BatchPart(keras.layers.Layer):
    """The rows of one of several parts of a batch, which differ by one row at most.

    Args:
        part: number of the part.
        parts: how many there are.
        **kwargs: of `keras.layers.Layer`.
    """

    def __init__(self, part: int, parts: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.part = part
        self.parts = parts

    def call(self, inputs: Any) -> Any:
        """Takes the rows.

        Args:
            inputs: of any shape, rows first.
        """
        rows = tf.shape(inputs)[0]
        return inputs[rows * self.part // self.parts : rows * (self.part + 1) // self.parts]

    def compute_output_spec(self, inputs: Any) -> Any:
        """Any number of rows."""
        return keras.KerasTensor((None, *inputs.shape[1:]), inputs.dtype)

    def get_config(self) -> dict[str, Any]:
        """See `keras.layers.Layer`."""
        return {**super().get_config(), "part": self.part, "parts": self.parts}


def replicate(model: Any, devices: Sequence[str], cpu_merge: bool = True, cpu_relocation: bool = False) -> Any:
    """Divides each batch over devices, runs the model on each of them, and joins the outputs.

    There is one set of weights, which the devices read in each step; gradients are added where the weights are. That is
    what `keras.utils.multi_gpu_model` did. `tfdist.AllReduceStrategy(devices=…)` keeps a copy of the weights on each
    device instead, which is faster where they fit.

    Statistics of a batch, as of BatchNormalization, are those of each part. A batch should have as many rows as there
    are devices, or more.

    Args:
        model: a Functional or Sequential model.
        devices: such as ``["GPU:0", "GPU:1"]``.
        cpu_merge: whether the outputs are joined on the CPU, else on the first device.
        cpu_relocation: whether weights and the optimizer's variables are on the CPU: those of a copy of the model. Else
            they stay where they are, and the two models share them.

    Returns:
        A functional model, to be compiled.

    Raises:
        ValueError: a device does not exist, or the model has no graph.
    """
    names = device_names.all_resolved("tfdist.replicate", devices)
    graph = graph_of(model)
    inner = _on_the_cpu(model) if cpu_relocation else model
    calls = ModelCalls(inner)
    is_placed = any(call.device is not None for call in calls.calls)
    inputs = tree.map_structure(
        lambda one: keras.Input(batch_shape=(None, *one.shape[1:]), dtype=one.dtype, name=one.name),
        graph._inputs_struct,
    )
    outputs = []
    for number, name in enumerate(names):
        with device_scope(name):
            parts = tree.map_structure(lambda one, part=number: BatchPart(part, len(names))(one), inputs)
            outputs.append(_called_again(calls, inner, parts) if is_placed else inner(parts))
    with device_scope(_CPU if cpu_merge else names[0]):
        joined = tree.map_structure(
            lambda *parts: keras.layers.Concatenate(axis=0)(list(parts)) if len(parts) > 1 else parts[0], *outputs
        )
    return keras.Model(inputs, joined)


def _called_again(calls: ModelCalls, model: Any, inputs: Any) -> Any:
    """Calls a model's layers, in the scope of the caller instead of those that they were called in.

    Raises:
        ValueError: layers of models inside have the same names.
    """
    operations = {id(call.operation): call.operation for call in calls.calls}.values()
    names = [one.name for one in operations]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"tfdist.replicate takes a model that was made in device scopes apart, and several of its layers are named "
            f"{twice}: make the model without scopes, or give its layers different names"
        )
    values = dict(zip(calls.inputs, tree.flatten(inputs), strict=True))
    calls.run(calls.calls, values)
    return tree.pack_sequence_as(graph_of(model)._outputs_struct, [values[key] for key in calls.outputs])


def _on_the_cpu(model: Any) -> Any:
    """A copy whose variables are on the CPU; its calls are where it is called."""
    keras_placement.install()

    @functools.cache  # models inside may share layers with those around them
    def copied(layer: Any) -> Any:
        if id(layer) in opened:
            return keras.models.clone_model(layer, clone_function=copied)
        return layer.__class__.from_config(layer.get_config())

    opened = ModelCalls(model).graphs
    with contextlib.ExitStack() as stack:
        stack.enter_context(tf.device(_CPU))
        for one, nodes in opened.values():
            stack.enter_context(keras_placement.temporarily(one, nodes, [None] * len(nodes)))
        made = keras.models.clone_model(model, clone_function=copied)
    for variable in made.variables:
        placed_variables.lives_on(variable, _CPU)
    made.set_weights(model.get_weights())
    return made
