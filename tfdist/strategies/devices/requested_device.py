"""The device that `tfdist.device_scope` requests for new variables and operations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability
from tfdist.thread_values import ThreadValue

DEVICE = "_tfdist_device"
"""Attribute of a node or a variable: the device that was asked for."""


_requested: ThreadValue[str | None] = ThreadValue(None)
"""The device that a thread has requested last."""


def current() -> str | None:
    """Returns the device that was requested last, such as ``"/device:GPU:0"``; None without a request."""
    return _requested.value


def requested(device: str) -> contextlib.AbstractContextManager[None]:
    """Context in which `current` returns this device.

    Args:
        device: name of a device with type and number.
    """
    return _requested.set_to(device)


def check_replicas() -> None:
    """Checks that a layer can be on a device of its own.

    Raises:
        ValueError: the strategy at work has several replicas in this process.
    """
    extended = current_strategy.current(Ability)
    if extended is not None:
        _check(len(extended.worker_devices))


def _check(replicas: int) -> None:
    if replicas > 1:
        raise ValueError(
            f"tfdist.device_scope places a layer on one device, and this strategy has {replicas} replicas in each "
            "process: give the strategy one device for each process"
        )


def creating(create: Callable[..., Any], replicas: int, home: str | None = None) -> Callable[..., Any]:
    """Returns a function that makes variables on the requested device instead of the strategy's.

    Args:
        create: function that makes a variable on the strategy's device.
        replicas: number of the strategy's replicas in this process.
        home: device on which the strategy places the variables of all replicas; None for each replica's own device.

    Returns:
        A function that makes variables on ``home``, else on the requested device, else as ``create`` does.

    Raises:
        ValueError: a device was requested, and the strategy has several replicas in this process.
    """
    device = home or current()
    if device is None:
        return create
    if home is None:
        _check(replicas)

    def created(**kwargs: Any) -> Any:
        with tf.device(device):
            return create(**kwargs)

    return created
