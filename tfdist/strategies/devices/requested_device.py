"""The device on which new variables and operations are to be, as `tfdist.device_scope` asks for it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.strategies import at_work
from tfdist.strategies.abilities import Ability


class _Requests(threading.local):
    """What this thread has asked for; the innermost last."""

    def __init__(self) -> None:
        self.devices: list[str] = []


_requests = _Requests()


def current() -> str | None:
    """The device that was asked for last, such as ``"/device:GPU:0"``; None if none was."""
    return _requests.devices[-1] if _requests.devices else None


@contextlib.contextmanager
def requested(device: str) -> Iterator[None]:
    """Context in which `current` is this device.

    Args:
        device: with type and number.
    """
    _requests.devices.append(device)
    try:
        yield
    finally:
        _requests.devices.pop()


def check_replicas() -> None:
    """Checks that a layer can be on a device of its own.

    Raises:
        ValueError: the strategy at work has several replicas in this process.
    """
    extended = at_work.current(Ability)
    if extended is not None:
        _check(len(extended.worker_devices))


def _check(replicas: int) -> None:
    if replicas > 1:
        raise ValueError(
            f"tfdist.device_scope places a layer on one device, and this strategy has {replicas} replicas in each "
            "process: give the strategy one device for each process"
        )


def creating(create: Callable[..., Any], replicas: int, home: str | None = None) -> Callable[..., Any]:
    """A function that makes a variable, for a strategy, which would place it itself.

    Args:
        create: makes it on the strategy's device.
        replicas: of the strategy in this process.
        home: where the strategy wants all variables, those of each replica; None for the replica's device.

    Returns:
        The function, which makes it on that device, else on the one that was asked for, if one was.

    Raises:
        ValueError: a device was asked for, and the strategy has a copy on each of several.
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
