"""Patches of Keras ("seams") that place a model's computations, its variables, and its optimizer's variables.

Checked on Keras 3.10 and 3.15. The first device scope or `tfdist.load_model` installs them: importing tfdist changes
nothing. Models without devices behave as in Keras.

| seam | why |
|---|---|
| `Node` | a functional model runs its calls later, outside the scope that they were made in |
| `_run_through_graph` of functional models | each call runs on its device |
| `clone_graph_nodes` of functional models | calls of a model made from another one's tensors keep their devices |
| `add`, ``build`` of `Sequential` | with each new layer it makes all calls again, in the scope of the last one |
| clones of `Sequential` | keep the devices of their layers |
| variables and optimizers | `tfdist.model_parallel.placed_variables` |
| ``jit_compile`` | XLA compiles for one device |
| serialization | `tfdist.model_parallel.keras_placement_saving` |
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfdist.model_parallel import keras_placement_saving, placed_gradients, placed_variables
from tfdist.model_parallel.keras_placement_saving import ADDED_ON, DEVICES
from tfdist.model_parallel.placed_gradients import placed
from tfdist.private import graphs, models
from tfdist.private.keras import (
    base_trainer,
    cloning,
    function,
    functional,
    layer,
    node,
    operation,
)
from tfdist.private.keras import sequential as sequentials
from tfdist.seams import trainer
from tfdist.seams.once import Once
from tfdist.seams.registry import replace
from tfdist.strategies.devices import requested_device
from tfdist.strategies.devices.requested_device import DEVICE
from tfdist.strategies.keras import sequential_build

_NOT_BY_XLA = (
    "the model {} has layers in a tfdist.device_scope, and XLA compiles for one device: compile it with "
    "jit_compile=False"
)


class _Calls(threading.local):
    """State of a thread: what Keras is doing with calls.

    Attributes:
        cloned: the node that Keras is copying.
        added_on: devices by `id` of a layer, while a Sequential calls its layers; None otherwise.
        loaded: device of the next call of a model that is being loaded; None without one.
    """

    cloned: Any = None
    added_on: dict[int, str] | None = None
    loaded: str | None = None


_calls = _Calls()


@Once
def install() -> None:
    """Installs the seams, once."""
    placed_gradients.install()
    replace(node.Node, "__init__", _record_device)
    replace(function.Function, "_run_through_graph", _on_devices)
    replace(functional, "find_nodes_by_inputs_and_outputs", _track_cloned_node)
    replace(functional, "clone_graph_nodes", _ending_the_clone)
    replace(sequentials.Sequential, "add", _noting_the_scope)
    sequential_build.replace_build(_in_the_scopes_of_layers)
    for caller in (operation.Operation, layer.Layer):
        replace(caller, "__call__", _in_its_scope)
    replace(cloning, "_clone_sequential_model", _with_its_scopes)
    placed_variables.install()
    replace(base_trainer, "model_supports_jit", _disable_jit_if_placed)
    trainer.points.provide([NotByXla], lambda model: [NotByXla()])
    keras_placement_saving.install(device_of, call_next_on)


def device_of(call: Any) -> str | None:
    """Returns the device of a call.

    Args:
        call: a node of a functional model.

    Returns:
        A device such as ``"/device:GPU:1"``; None if no scope asked for one.
    """
    return getattr(call, DEVICE, None)


def is_placed(model: Any) -> bool:
    """Returns whether a model has calls on requested devices. Calls in the ``call`` of a subclass are not known.

    Args:
        model: a Keras model.
    """
    layers = models.layers_of(model)
    if any(getattr(model_layer, DEVICES, None) for model_layer in layers):
        return True
    parts = [models.graph_of(model_layer) for model_layer in layers]
    return any(device_of(node) for part in parts if isinstance(part, function.Function) for node in nodes_of(part))


def nodes_of(model: Any) -> list[Any]:
    """Returns the calls of a functional model, in the order in which the model runs them.

    Args:
        model: a Keras `Function`.
    """
    return [node for node in models.nodes_of(model) if node.operation and not node.is_input]


@contextlib.contextmanager
def temporarily(model: Any, calls: list[Any], devices: Sequence[str | None]) -> Iterator[None]:
    """Context in which the calls of a model are on given devices, to make copies of the model.

    Args:
        model: a functional or sequential model.
        calls: the model's calls, as `nodes_of` returns them.
        devices: device of each call; None for no device.
    """
    before = [device_of(call) for call in calls]
    added_on = model.__dict__.get(DEVICES)
    for call, device in zip(calls, devices, strict=True):
        setattr(call, DEVICE, device)
    operations = [call.operation for call in calls]
    model.__dict__[DEVICES] = {
        id(operation): device for operation, device in zip(operations, devices, strict=True) if device is not None
    }
    try:
        yield
    finally:
        for call, was in zip(calls, before, strict=True):
            setattr(call, DEVICE, was)
        del model.__dict__[DEVICES]
        if added_on is not None:
            model.__dict__[DEVICES] = added_on


# Calls.


def _record_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        cloned = _calls.cloned
        setattr(self, DEVICE, requested_device.current() if cloned is None else device_of(cloned))

    return __init__


def _on_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    def _run_through_graph(
        self: Any, inputs: Any, operation_fn: Callable[[Any], Any] = lambda operation: operation, **kwargs: Any
    ) -> Any:
        nodes = nodes_of(self)
        # With `call_fn`, Keras only checks the graph. Without devices, Keras places all calls.
        if kwargs.get("call_fn") is not None or not any(map(device_of, nodes)):
            return original(self, inputs, operation_fn=operation_fn, **kwargs)
        if graphs.is_compiled_by_xla():
            raise ValueError(_NOT_BY_XLA.format(getattr(self, "name", "that is compiled")))
        # Keras tells which operation runs, but not which call of it. The calls of one operation run in their order.
        calls: collections.defaultdict[int, collections.deque[str | None]] = collections.defaultdict(collections.deque)
        for call_node in nodes:
            calls[id(call_node.operation)].append(device_of(call_node))

        def on_its_device(operation: Any) -> Any:
            left = calls[id(operation)]
            device = left.popleft() if left else None
            call = operation_fn(operation)
            if device is None:
                return call

            @functools.wraps(call)
            def run(*args: Any, **kwargs: Any) -> Any:
                with placed(device):
                    return call(*args, **kwargs)

            return run

        return original(self, inputs, operation_fn=on_its_device, **kwargs)

    return _run_through_graph


def _track_cloned_node(original: Callable[..., Any]) -> Callable[..., Any]:
    def find_nodes_by_inputs_and_outputs(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for cloned in original(*args, **kwargs):
            _calls.cloned = cloned
            yield cloned

    return find_nodes_by_inputs_and_outputs


def _ending_the_clone(original: Callable[..., Any]) -> Callable[..., Any]:
    def clone_graph_nodes(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            _calls.cloned = None

    return clone_graph_nodes


# Sequential.


def _noting_the_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    def add(self: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        device = requested_device.current() or getattr(layer, ADDED_ON, None)
        if device is not None:
            self.__dict__.setdefault(DEVICES, {})[id(layer)] = device
        elif DEVICES in self.__dict__:
            self.__dict__[DEVICES].pop(id(layer), None)  # of a removed layer that had the same `id`
        return original(self, layer, *args, **kwargs)

    return add


def _in_the_scopes_of_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        before, _calls.added_on = _calls.added_on, self.__dict__.get(DEVICES)
        try:
            original(self, *args, **kwargs)
        finally:
            _calls.added_on = before
        graph = models.graph_of(self)
        if graph is not self:  # calls without a scope of their own run where the model is called
            devices = self.__dict__.get(DEVICES, {})
            for call_node in nodes_of(graph):
                setattr(call_node, DEVICE, devices.get(id(call_node.operation)))

    return build


def _with_its_scopes(original: Callable[..., Any]) -> Callable[..., Any]:
    def _clone_sequential_model(model: Any, clone_function: Callable[[Any], Any], *args: Any, **kwargs: Any) -> Any:
        devices = model.__dict__.get(DEVICES, {})

        def clone(layer: Any) -> Any:
            made = clone_function(layer)
            if id(layer) in devices:
                made.__dict__[ADDED_ON] = devices[id(layer)]
            return made

        return original(model, clone, *args, **kwargs)

    return _clone_sequential_model


def call_next_on(device: str | None) -> None:
    """Sets the device of the next call that this thread makes, as the model was saved.

    Args:
        device: a device of this process; None for no device.
    """
    _calls.loaded = device


def _in_its_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        added_on, device = _calls.added_on, _calls.loaded
        if added_on is None and device is None:
            return original(self, *args, **kwargs)
        if added_on is not None:
            device = added_on.get(id(self))
        _calls.added_on = _calls.loaded = None
        try:
            with placed(device) if device is not None else contextlib.nullcontext():
                return original(self, *args, **kwargs)
        finally:
            _calls.added_on = added_on

    return __call__


# XLA.


def _disable_jit_if_placed(original: Callable[..., bool]) -> Callable[..., bool]:
    def model_supports_jit(model: Any) -> bool:
        return not is_placed(model) and original(model)

    return model_supports_jit


class NotByXla(trainer.TrainerHooks):
    """Hooks that refuse compilation by XLA for models with layers in device scopes."""

    def compile(self, call: trainer.TrainerCall) -> None:
        """Refuses ``jit_compile=True``.

        Raises:
            ValueError: ``jit_compile`` is True, and the model has layers in device scopes.
        """
        if call.arguments["jit_compile"] is True and is_placed(call.model):
            raise ValueError(_NOT_BY_XLA.format(call.model.name))
