"""The calls of a model and of the models inside it, as one sequence, parts of which can be run."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist.model_parallel import keras_placement
from tfdist.private import models
from tfdist.private.keras import backend, function, functional, tree


@dataclass(frozen=True, eq=False)
class ModelCall:
    """A call of a layer or an operation.

    Attributes:
        node: Keras's record of the call.
        name: name of the layer, after the names of the models that contain it, such as ``"base/conv1"``.
        inputs: keys of the tensors that the call takes, one for each of the node's.
        outputs: keys of the tensors that the call makes.
        device: device that a `tfdist.device_scope` asked for; None without one.
        training: ``training`` argument that a model around the call was called with; None if there was none.
    """

    node: Any
    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    device: str | None = None
    training: bool | None = None

    @property
    def operation(self) -> Any:
        """The layer or operation that is called."""
        return self.node.operation


class ModelCalls:
    """The calls of a model, in an order in which they can run.

    The calls of a model inside it replace the call of that model. The inner model remains one call if it is called more
    than once, is called with more than tensors, or has a ``call`` of its own.

    Args:
        model: a Functional or Sequential model.

    Attributes:
        calls: `ModelCall` objects in an order in which they can run.
        graphs: the model, and the models inside it whose calls are listed, each with its nodes, by the model's `id`.
        inputs: keys of the model's inputs, in their order.
        outputs: keys of the model's outputs, in their order.
        tensors: Keras's description of each tensor, by key.

    Raises:
        ValueError: the model has no graph.
    """

    def __init__(self, model: Any) -> None:
        graph = graph_of(model)
        self.calls: list[ModelCall] = []
        self.graphs: dict[int, tuple[Any, list[Any]]] = {}
        self.tensors: dict[int, Any] = {}
        self._same: dict[int, int] = {}
        self._described: list[Any] = []
        self._rows = {tensor.shape[0] for tensor in models.inputs_of(graph)} - {None}
        self.inputs = tuple(self._new(tensor) for tensor in models.inputs_of(graph))
        self._open(model, graph, "", None, None)
        self.outputs = tuple(self._key(tensor) for tensor in models.outputs_of(graph))

    def run(self, calls: Iterable[ModelCall], values: dict[int, Any], training: bool | None = None) -> None:
        """Runs some of the calls.

        Args:
            calls: calls in an order in which they can run.
            values: tensors by their keys, of all that the calls take and do not make; `run` adds those that they make.
            training: ``training`` argument of the model; None uses that of each call.
        """
        _Frame(lambda: self._run(calls, values, training))(training=training)

    def _run(self, calls: Iterable[ModelCall], values: dict[int, Any], training: bool | None) -> None:
        for call in calls:
            node = call.node
            given = zip(node.input_tensors, call.inputs, strict=True)
            filled = {id(tensor): _as(values[key], tensor.dtype) for tensor, key in given}
            args, kwargs = node.arguments.fill_in(filled)
            mode = call.training if training is None else training
            if mode is not None and "training" in models.arguments_of_context(node.operation):
                kwargs["training"] = mode
            values.update(zip(call.outputs, tree.flatten(node.operation(*args, **kwargs)), strict=True))

    def sources(self, calls: Sequence[ModelCall]) -> list[int]:
        """Returns the keys of the tensors that calls take and do not make.

        Args:
            calls: some of the model's calls.
        """
        made = {key for call in calls for key in call.outputs}
        return list(dict.fromkeys(key for call in calls for key in call.inputs if key not in made))

    def needed_of(self, begin: int, end: int) -> list[int]:
        """Returns the keys of the tensors that a range of calls makes for later calls, or for the model's outputs.

        Args:
            begin: index of the first call of the range.
            end: index after the last call of the range.
        """
        later = {key for call in self.calls[end:] for key in call.inputs}.union(self.outputs)
        return [key for call in self.calls[begin:end] for key in call.outputs if key in later]

    def _open(self, model: Any, graph: Any, prefix: str, around: str | None, training: bool | None) -> None:
        nodes = keras_placement.nodes_of(graph)
        self.graphs[id(model)] = model, nodes
        times = collections.Counter(id(node.operation) for node in nodes)
        seen: collections.Counter[int] = collections.Counter()
        for node in nodes:
            operation = node.operation
            seen[id(operation)] += 1
            number = f" ({seen[id(operation)]})" if seen[id(operation)] > 1 else ""
            name = f"{prefix}{operation.name}{number}"
            device = keras_placement.device_of(node) or around
            inner = _inside(node) if times[id(operation)] == 1 and id(operation) not in self.graphs else None
            if inner is None:
                inputs, outputs = map(self._key, node.input_tensors), map(self._new, node.outputs)
                self.calls.append(ModelCall(node, name, tuple(inputs), tuple(outputs), device, training))
                continue
            for inner_tensor, given in zip(models.inputs_of(inner), tree.flatten(node.arguments.args), strict=True):
                self._equate(inner_tensor, self._key(given))
            passed = node.arguments.kwargs.get("training")
            self._open(operation, inner, f"{name}/", device, training if passed is None else passed)
            for inner_tensor, made in zip(models.outputs_of(inner), node.outputs, strict=True):
                self._equate(made, self._key(inner_tensor))

    def _new(self, tensor: Any) -> int:
        key = len(self.tensors)
        self.tensors[key] = self._of_any_rows(tensor)
        self._equate(tensor, key)
        return key

    def _of_any_rows(self, tensor: Any) -> Any:
        """Returns a tensor of any number of samples: a model that is built from a batch has only that of the batch."""
        if not len(tensor.shape) or tensor.shape[0] not in self._rows:
            return tensor
        return backend.KerasTensor((None, *tensor.shape[1:]), tensor.dtype, sparse=tensor.sparse, name=tensor.name)

    def _equate(self, tensor: Any, key: int) -> None:
        self._described.append(tensor)  # keeps the tensor alive, whose `id` is a key
        self._same[id(tensor)] = key

    def _key(self, tensor: Any) -> int:
        return self._same[id(tensor)]


def clear_losses(calls: Iterable[ModelCall]) -> None:
    """Clears what calls outside of their model have added to layers' losses.

    Args:
        calls: calls that were made.
    """
    for call in calls:
        if isinstance(call.operation, keras.Layer):
            models.forget_losses(call.operation)


def trainable_variables(layers: Iterable[Any]) -> list[Any]:
    """Returns the trainable variables of layers, each once, even if several layers have it.

    Args:
        layers: layers, or operations, which have no variables.
    """
    return list(
        {id(variable): variable for layer in layers for variable in getattr(layer, "trainable_variables", ())}.values()
    )


class _Frame(keras.Layer):
    """A layer that makes calls inside it, so that layers get its ``training`` argument as they get their model's.

    Args:
        run: makes the calls.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__(name="calls")
        self.built = True
        self._run = run

    def call(self, training: bool | None = None) -> None:
        """Makes the calls."""
        self._run()


def graph_of(model: Any) -> Any:
    """Returns the graph of a model's calls.

    Args:
        model: a Keras model.

    Returns:
        A Keras `Function`: the model itself, or the model that a Sequential contains.

    Raises:
        ValueError: the model has no graph.
    """
    graph = models.graph_of(model)
    if isinstance(graph, function.Function):
        return graph
    expected = "expected a Functional model, or a Sequential one with an Input; got"
    if not isinstance(model, keras.Model):
        raise ValueError(f"{expected} {model!r}, which is not a Keras model")
    given = f"{expected} {model.name}, a {type(model).__name__},"
    if isinstance(model, keras.Sequential):
        raise ValueError(f"{given} which is not built yet. Begin it with a keras.Input, or build it.")
    raise ValueError(f"{given} which has no graph of layers. Write it with the functional API.")


def _inside(node: Any) -> Any:
    """Returns the graph of the model that a node calls, if running the graph's calls is the same; None otherwise."""
    operation = node.operation
    if type(operation).call not in (functional.Functional.call, keras.Sequential.call):
        return None
    graph = models.graph_of(operation)
    if not isinstance(graph, function.Function):
        return None
    args, kwargs = node.arguments.args, node.arguments.kwargs
    passed = {name for name, value in kwargs.items() if value is not None}
    if "mask" in passed and len(args) == 1:
        pairs = zip(tree.flatten(args[0]), tree.flatten(kwargs["mask"]), strict=False)
        if all(mask is backend.get_keras_mask(tensor) for tensor, mask in pairs):
            passed.remove("mask")  # the tensors themselves carry it
    if len(args) != 1 or passed - {"training"} or isinstance(kwargs.get("training"), backend.KerasTensor):
        return None
    if not isinstance(args[0], backend.KerasTensor) or len(models.inputs_of(graph)) != 1:
        try:
            tree.assert_same_structure(args[0], models.structure_of_inputs(graph))
        except ValueError:
            return None
    given = tree.flatten(args[0])
    fits = all(
        isinstance(tensor, backend.KerasTensor) and len(tensor.shape) == len(expected.shape)
        for tensor, expected in zip(given, models.inputs_of(graph), strict=True)
    )
    return graph if fits else None


def _as(value: Any, dtype: str) -> Any:
    """Returns a tensor in the dtype that a model inside another one takes, with its mask."""
    if not isinstance(value, tf.Tensor) or value.dtype == dtype:
        return value
    cast = tf.cast(value, dtype)
    mask = backend.get_keras_mask(value)
    if mask is not None:
        backend.set_keras_mask(cast, mask)
    return cast
