"""Private members of Keras's models, layers, graphs and variables, read here and in `tfdist.seams` only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def strategy_of(owner: Any, otherwise: Any = None) -> Any:
    """Returns the strategy that a model, an iterator of its data, or a TensorFlow variable was made under."""
    return getattr(owner, "_distribute_strategy", otherwise)


def xla_by_default(model: Any) -> bool:
    """Returns what ``jit_compile="auto"`` would mean without a strategy; under one, Keras never uses XLA."""
    strategy = model._distribute_strategy
    model._distribute_strategy = None
    try:
        return bool(model._resolve_auto_jit_compile())
    finally:
        model._distribute_strategy = strategy


@contextlib.contextmanager
def without_xla(model: Any) -> Iterator[None]:
    """Context in which Keras makes a model's step functions without XLA."""
    before, model._jit_compile = model._jit_compile, False
    try:
        yield
    finally:
        model._jit_compile = before


def layers_of(model: Any) -> list[Any]:
    """Returns a model and all layers in it."""
    return list(model._flatten_layers())


def metrics_in(owner: Any) -> list[Any]:
    """Returns the metrics that are attributes of a layer or of another metric."""
    return list(owner._metrics)


def state_of(layer: Any) -> list[Any]:
    """Returns the variables that a layer created as non-trainable, without weights that were frozen later."""
    return list(layer._non_trainable_variables)


def initial_epoch(model: Any) -> int:
    """Returns the epoch that a callback has set for `fit` to begin with; 0 if none has."""
    return int(model._initial_epoch or 0)


def begin_at(model: Any, epoch: int | None) -> None:
    """Sets the epoch that `fit` begins with, from a callback's `on_train_begin`; None leaves the argument of `fit`."""
    model._initial_epoch = epoch


def build_state(model: Any, batch: Any) -> None:
    """Builds a model, its metrics and its optimizer, as far as they are not, from a batch or a placeholder of one."""
    model._symbolic_build(data_batch=batch)


def loss_tracker(model: Any) -> Any:
    """Returns the metric that tracks the loss of a compiled model."""
    return model._loss_tracker


def compute_loss(model: Any, **arguments: Any) -> Any:
    """Calls a model's ``compute_loss`` with those arguments that the method takes."""
    return model._compute_loss(**arguments)


def forget_losses(layer: Any) -> None:
    """Removes the losses that a layer's calls have added."""
    layer._clear_losses()


@contextlib.contextmanager
def losses_kept(model: Any) -> Iterator[None]:
    """Context in which other replicas may call a model; afterwards its layers have their earlier losses again."""
    before = [(layer, list(layer._losses)) for layer in layers_of(model)]
    try:
        yield
    finally:
        for layer, losses in before:
            layer._losses.clear()
            layer._losses.extend(losses)


def value_of(variable: Any) -> Any:
    """Returns the TensorFlow variable of a Keras variable, also inside a stateless scope."""
    return variable._value


def initializer_of(variable: Any) -> Any:
    """Returns the initializer of a variable without a value; None if the variable has a value."""
    return variable._initializer


def graph_of(model: Any) -> Any:
    """Returns the functional graph of a `keras.Sequential`; any other model itself."""
    return getattr(model, "_functional", None) or model


def inputs_of(graph: Any) -> list[Any]:
    """Returns the symbolic inputs of a graph."""
    return list(graph._inputs)


def outputs_of(graph: Any) -> list[Any]:
    """Returns the symbolic outputs of a graph."""
    return list(graph._outputs)


def structure_of_inputs(graph: Any) -> Any:
    """Returns the nested structure of a graph's inputs."""
    return graph._inputs_struct


def structure_of_outputs(graph: Any) -> Any:
    """Returns the nested structure of a graph's outputs."""
    return graph._outputs_struct


def standardized(graph: Any, inputs: Any) -> list[Any]:
    """Returns inputs as a list in a graph's order, with its types and ranks."""
    return list(graph._standardize_inputs(inputs))


def nodes_of(graph: Any) -> list[Any]:
    """Returns the nodes of a graph, in the order in which the graph runs them."""
    return [node for depth in sorted(graph._nodes_by_depth, reverse=True) for node in graph._nodes_by_depth[depth]]


def arguments_of_context(operation: Any) -> Any:
    """Returns the names of the arguments that an operation takes from the calls around it, such as ``training``."""
    return getattr(operation, "_call_context_args", ())


def logits_of(tensor: Any) -> Any:
    """Returns the logits that an activation has kept with its output for more exact losses, or None."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Attaches logits to the output of an activation."""
    tensor._keras_logits = logits


@contextlib.contextmanager
def shaped(variable: Any, shape: tuple[int, ...]) -> Iterator[None]:
    """Context in which a Keras variable has another shape, and is given a value of that shape."""
    before, variable._shape = variable._shape, shape
    try:
        yield
    finally:
        variable._shape = before


def own_variables(layer: Any) -> list[Any]:
    """Returns the variables that a layer has itself, without those of layers in it."""
    return [*layer._trainable_variables, *layer._non_trainable_variables]
