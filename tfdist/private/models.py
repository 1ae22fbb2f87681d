"""Private members of Keras's models, layers, graphs and variables, read here and in `tfdist.seams` only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


def strategy_of(owner: Any, otherwise: Any = None) -> Any:
    """The strategy that a model, an iterator of its data, or a variable of TensorFlow was made under."""
    return getattr(owner, "_distribute_strategy", otherwise)


def xla_by_default(model: Any) -> bool:
    """What ``jit_compile="auto"`` means for a model under no strategy; under one, it is always no."""
    strategy = model._distribute_strategy
    model._distribute_strategy = None
    try:
        return bool(model._resolve_auto_jit_compile())
    finally:
        model._distribute_strategy = strategy


@contextlib.contextmanager
def without_xla(model: Any) -> Iterator[None]:
    """Context in which Keras makes functions of a model that XLA does not compile."""
    before, model._jit_compile = model._jit_compile, False
    try:
        yield
    finally:
        model._jit_compile = before


def layers_of(model: Any) -> list[Any]:
    """A model and all layers in it."""
    return list(model._flatten_layers())


def metrics_in(owner: Any) -> list[Any]:
    """The metrics that are attributes of a layer or of another metric."""
    return list(owner._metrics)


def state_of(layer: Any) -> list[Any]:
    """The variables of a layer that it made as non-trainable ones: not those that were frozen later."""
    return list(layer._non_trainable_variables)


def initial_epoch(model: Any) -> int:
    """The epoch that callbacks have `fit` begin with."""
    return int(model._initial_epoch or 0)


def begin_at(model: Any, epoch: int | None) -> None:
    """Has `fit` begin with an epoch; None for that of its argument. For callbacks, at the beginning of training."""
    model._initial_epoch = epoch


def loss_tracker(model: Any) -> Any:
    """The metric of the loss of a model that is compiled."""
    return model._loss_tracker


def compute_loss(model: Any, **arguments: Any) -> Any:
    """``compute_loss`` of a model, also one whose method takes fewer arguments."""
    return model._compute_loss(**arguments)


def forget_losses(layer: Any) -> None:
    """Has a layer forget what its calls have added to the loss."""
    layer._clear_losses()


@contextlib.contextmanager
def losses_kept(model: Any) -> Iterator[None]:
    """Context in which others may call a model, too: what its layers have added to the loss before stays so."""
    before = [(layer, list(layer._losses)) for layer in layers_of(model)]
    yield
    for layer, losses in before:
        layer._losses.clear()
        layer._losses.extend(losses)


def value_of(variable: Any) -> Any:
    """TensorFlow's variable in a variable of Keras, whatever the scope."""
    return variable._value


def initializer_of(variable: Any) -> Any:
    """What makes the value of a variable that has none yet; None if it has one."""
    return variable._initializer


def graph_of(model: Any) -> Any:
    """The graph of a `keras.Sequential`; the model itself if it is not one that has one."""
    return getattr(model, "_functional", None) or model


def inputs_of(graph: Any) -> list[Any]:
    """The symbolic inputs of a graph."""
    return list(graph._inputs)


def outputs_of(graph: Any) -> list[Any]:
    """The symbolic outputs of a graph."""
    return list(graph._outputs)


def structure_of_inputs(graph: Any) -> Any:
    """How a graph's inputs are nested."""
    return graph._inputs_struct


def structure_of_outputs(graph: Any) -> Any:
    """How a graph's outputs are nested."""
    return graph._outputs_struct


def standardized(graph: Any, inputs: Any) -> list[Any]:
    """Inputs in a graph's order, with its types and ranks."""
    return list(graph._standardize_inputs(inputs))


def nodes_of(graph: Any) -> list[Any]:
    """The nodes of a graph, in the order in which it runs them."""
    return [node for depth in sorted(graph._nodes_by_depth, reverse=True) for node in graph._nodes_by_depth[depth]]


def arguments_of_context(operation: Any) -> Any:
    """The names of the arguments that an operation takes from the calls around it, as ``training``."""
    return getattr(operation, "_call_context_args", ())


def logits_of(tensor: Any) -> Any:
    """The logits that an activation has kept with its output, by which losses are more exact; or None."""
    return getattr(tensor, "_keras_logits", None)


def set_logits(tensor: Any, logits: Any) -> None:
    """Keeps logits with a tensor."""
    tensor._keras_logits = logits
