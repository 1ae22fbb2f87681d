"""Names of this process's devices."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def resolved(device: str) -> str:
    """The full name of a device, such as ``"/device:GPU:1"``.

    Args:
        device: such as ``"GPU:1"``, ``"/gpu:1"`` or ``"CPU"``.

    Raises:
        ValueError: there is no such device.
    """
    here = [name for kind in ("CPU", "GPU", "TPU") for name in logical(kind)]
    found = _described(device) if isinstance(device, str) else None
    if found is None or found.removeprefix("/device:") not in here:
        raise ValueError(f"expected a device of this process; got {device!r}. There are {', '.join(here)}.")
    return found


def logical(kind: str) -> list[str]:
    """The devices of one kind that TensorFlow has, or will have: none is initialized, as listing them would.

    Args:
        kind: "CPU", "GPU" or "TPU".

    Returns:
        Their names, such as ``"GPU:1"``.
    """
    physical = tf.config.get_visible_devices(kind)
    count = sum(len(tf.config.get_logical_device_configuration(one) or [one]) for one in physical)
    return [f"{kind}:{number}" for number in range(count)]


def all_resolved(caller: str, devices: Sequence[str]) -> list[str]:
    """The full names of several devices.

    Args:
        caller: what they were given to, for messages.
        devices: as of `resolved`; one or more.

    Raises:
        ValueError: one of them does not exist, or they are no sequence of names, or none.
    """
    if isinstance(devices, (str, bytes)) or not isinstance(devices, Sequence) or not devices:
        example = logical("GPU") or logical("CPU")
        raise ValueError(f"{caller} expects a list of devices, such as {example}; got {devices!r}")
    return [resolved(one) for one in devices]


def _described(device: str) -> str | None:
    """The name of a device of this process; None for what is no name, or the name of another process's device."""
    try:
        asked = tf.DeviceSpec.from_string(device if device.startswith("/") else f"/{device}")
    except (ValueError, AttributeError):
        return None
    is_elsewhere = asked.job not in (None, "localhost") or asked.replica or asked.task
    if is_elsewhere or asked.device_type is None or "*" in device:
        return None
    return f"/device:{asked.device_type.upper()}:{asked.device_index or 0}"
