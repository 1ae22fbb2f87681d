"""Devices in saved models; plain Keras loads such models all the same, and computes on its default device.

In the model's configuration, a call's device is next to its arguments, a variable's device next to its layer. Devices
that the loading process lacks are left out, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from tfdist.private.keras import function, functional, sequential, serialization_lib
from tfdist.seams.registry import replace
from tfdist.strategies.devices import device_names
from tfdist.strategies.devices.requested_device import DEVICE
from tfdist.thread_values import ThreadValue

log = logging.getLogger("tfdist")

DEVICES = "_tfdist_devices"
"""Attribute of a Sequential: the devices that layers were added on, by the layer's `id`."""
CALL = "tfdist_device"
"""Key in the configuration of a node or of a Sequential's layer: the device of the call."""
VARIABLES = "tfdist_variables"
"""Key in the configuration of a layer: the devices of its variables, by their paths from the layer's name on."""
ALL = ""
"""Path that stands for all variables of the layer."""
ADDED_ON = "_tfdist_added_on"
"""Attribute of a loaded layer: the device on which it is to be added to a Sequential."""


_loaded_on: ThreadValue[dict[str, str]] = ThreadValue({})
"""The devices of the variables of the layer that a thread loads, by path."""
_missing: set[str] = set()


def install(of_call: Callable[[Any], str | None], call_next_on: Callable[[str | None], None]) -> None:
    """Installs the seams.

    Args:
        of_call: returns the device of a node.
        call_next_on: sets the device of the next call of a layer.
    """

    def with_its_device(original: Callable[..., Any]) -> Callable[..., Any]:
        def serialize_node(node: Any, *args: Any, **kwargs: Any) -> Any:
            serialized = original(node, *args, **kwargs)
            if serialized is not None and (device := of_call(node)) is not None:
                serialized[CALL] = device
            return serialized

        return serialize_node

    def on_its_device(original: Callable[..., Any]) -> Callable[..., Any]:
        def deserialize_node(node_data: Any, *args: Any, **kwargs: Any) -> Any:
            arguments = original(node_data, *args, **kwargs)
            call_next_on(_here(node_data.get(CALL)) if isinstance(node_data, dict) else None)
            return arguments

        return deserialize_node

    replace(functional, "serialize_node", with_its_device)
    replace(functional, "deserialize_node", on_its_device)
    replace(functional.Functional, "get_config", _with_variables)
    replace(sequential.Sequential, "get_config", _with_layers)
    replace(serialization_lib, "deserialize_keras_object", _restore_devices)


def device_of(variable: Any) -> str | None:
    """Returns the saved device of a variable, if its layer is being loaded; None otherwise.

    Args:
        variable: a Keras variable that is being made.
    """
    full_path = f"/{variable.path}"
    for path, device in _loaded_on.value.items():  # wrappers build their layers alone, which shortens paths
        if path != ALL and (full_path.endswith(f"/{path}") or f"/{path}".endswith(full_path)):
            return device
    return _loaded_on.value.get(ALL)


def _with_variables(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_config(self: Any) -> Any:
        config = original(self)
        if "layers" in config and not isinstance(self, sequential.Sequential):
            for layer, described in zip(self.operations, config["layers"], strict=True):
                _describe(layer, described)
        return config

    return get_config


def _with_layers(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_config(self: Any) -> Any:
        config = original(self)
        devices = self.__dict__.get(DEVICES, {})
        for layer, described in zip(self._layers, config["layers"], strict=True):
            _describe(layer, described)
            if id(layer) in devices:
                described[CALL] = devices[id(layer)]
        return config

    return get_config


def _describe(layer: Any, described: dict[str, Any]) -> None:
    if isinstance(layer, (function.Function, sequential.Sequential)):
        return  # its own configuration has the devices
    devices = {}
    for variable in getattr(layer, "variables", ()):
        if (device := getattr(variable, DEVICE, None)) is not None:
            _, name, behind = f"/{variable.path}".rpartition(f"/{layer.name}/")
            devices[f"{layer.name}/{behind}" if name else variable.path] = device
    if len(devices) == len(getattr(layer, "variables", ())) and len(set(devices.values())) == 1:
        devices[ALL] = next(iter(devices.values()))  # layers inside it may get other names when it is loaded
    if devices:
        described[VARIABLES] = devices


def _restore_devices(original: Callable[..., Any]) -> Callable[..., Any]:
    def deserialize_keras_object(config: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(config, dict) or not config.keys() & {CALL, VARIABLES}:
            return original(config, *args, **kwargs)
        devices = {path: _here(device) for path, device in config.get(VARIABLES, {}).items()}
        with _loaded_on.set_to({path: device for path, device in devices.items() if device}):
            made = original(config, *args, **kwargs)
        if (device := _here(config.get(CALL))) is not None:
            made.__dict__[ADDED_ON] = device
        return made

    return deserialize_keras_object


def _here(device: str | None) -> str | None:
    """Returns a device of a saved model; None if this process lacks it."""
    if device is None:
        return None
    try:
        return device_names.resolved(device)
    except ValueError as error:
        if device not in _missing:
            _missing.add(device)
            log.warning("tfdist: a device of the saved model is missing, and Keras places its layers: %s", error)
        return None
