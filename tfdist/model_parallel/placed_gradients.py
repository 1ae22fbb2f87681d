"""Puts the operations of gradients on the devices of their forward operations.

By default, TensorFlow makes the operations of a gradient on the device where the tape is asked for it. Of a forward
operation, only the name scope reaches the function that makes its gradient. Therefore the scope's name contains the
device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.private import graphs
from tfdist.seams.once import Once
from tfdist.strategies.devices import requested_device

_MARK = re.compile(r"tfdist_on_([A-Za-z]+)_(\d+)_end")


@Once
def install() -> None:
    """Makes TensorFlow place gradients of operations in `placed`, once. Other gradients stay as they are."""
    graphs.replace_gradient_function(_on_its_device)
    graphs.replace_recording(_with_placed_backward)


@contextlib.contextmanager
def placed(device: str) -> Iterator[None]:
    """Context whose operations, variables and gradients are on a device; call `install` first.

    Args:
        device: device with type and number, such as ``"/device:GPU:0"``.

    Raises:
        ValueError: the strategy at work has several replicas in this process.
    """
    requested_device.check_replicas()
    kind, number = device.rsplit(":", 2)[-2:]
    with requested_device.requested(device), tf.device(device), tf.name_scope(f"tfdist_on_{kind}_{number}_end"):
        yield


def _on_its_device(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient_function(*args: Any) -> Any:
        marks = _MARK.findall(args[-1] or "")  # the name scope of the forward pass
        if not marks:
            return original(*args)
        with tf.device("/device:{}:{}".format(*marks[-1])):
            return original(*args)

    return gradient_function


def _with_placed_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Places the gradients of operations with a gradient in Python, such as those of `tf.custom_gradient`."""

    def record_operation(
        op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Callable[..., Any], **options: Any
    ) -> Any:
        device = requested_device.current()
        if device is None or op_type == "captured_value":  # a captured value is passed on as it is
            return original(op_type, output_tensors, input_tensors, backward_function, **options)

        def on_its_device(*gradients: Any) -> Any:
            with placed(device):
                return backward_function(*gradients)

        return original(op_type, output_tensors, input_tensors, on_its_device, **options)

    return record_operation
