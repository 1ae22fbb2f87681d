"""Names of this process's devices."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdist.private import tensorflow as private


def resolved(device: str) -> str:
    """Returns the full name of a device, such as ``"/device:GPU:1"``.

    Args:
        device: name of a device, such as ``"GPU:1"``, ``"/gpu:1"`` or ``"CPU"``.

    Raises:
        ValueError: there is no such device.
    """
    here = [name for kind in ("CPU", "GPU", "TPU") for name in logical(kind)]
    full_name = _described(device) if isinstance(device, str) else None
    if full_name is None or full_name.removeprefix("/device:") not in here:
        raise ValueError(f"expected a device of this process; got {device!r}. Choose from {', '.join(here)}.")
    return full_name


def logical(kind: str) -> list[str]:
    """Lists TensorFlow's logical devices of one kind, without initializing any.

    Args:
        kind: "CPU", "GPU" or "TPU".

    Returns:
        The devices' names, such as ``"GPU:1"``.
    """
    physical = tf.config.get_visible_devices(kind)
    count = sum(len(tf.config.get_logical_device_configuration(device) or [device]) for device in physical)
    return [f"{kind}:{number}" for number in range(count)]


def all_resolved(caller: str, devices: Sequence[str]) -> list[str]:
    """Returns the full names of several devices.

    Args:
        caller: the function and argument that got the devices, for messages.
        devices: names of one or more devices, such as ``"GPU:1"``.

    Raises:
        ValueError: a device does not exist, or `devices` is not a sequence of names, or is empty.
    """
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence) or not devices:
        example = logical("GPU") or logical("CPU")
        raise ValueError(f"{caller} expects a list of devices, such as {example}; got {devices!r}")
    return [resolved(device) for device in devices]


def _described(device: str) -> str | None:
    """Returns the full name of a device of this process; None for an invalid name or another process's device."""
    try:
        asked = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/{device}")
    except (ValueError, AttributeError):
        return None
    given = asked.job or "localhost", asked.task or 0
    is_here = given in (("localhost", 0), private.own_task()) and not asked.replica
    if not is_here or asked.device_type is None or "*" in device:
        return None
    return f"/device:{asked.device_type.upper()}:{asked.device_index or 0}"
