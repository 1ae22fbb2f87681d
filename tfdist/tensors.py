"""Converts between arrays and tensors without copies, and removes TensorFlow's and Keras's numbers from names."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.private import tensorflow as private

_DLPACK_KINDS = "fiuc"

HOST = private.HOST
"""The device whose tensors are in memory that host functions can read and write."""


def map_values(function: Callable[[tf.Tensor], tf.Tensor], value: Any) -> Any:
    """Returns a function of a tensor, or of the rows of `tf.IndexedSlices`, which stay rows at the same indices.

    Args:
        function: function that keeps the number of rows.
        value: a tensor, or `tf.IndexedSlices`.
    """
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), value.indices, value.dense_shape)
    return function(value)


def to_array(tensor: tf.Tensor) -> np.ndarray:
    """Converts an eager tensor to an array, which shares its memory if possible."""
    try:
        return np.asarray(tensor)
    except ValueError:  # TensorFlow makes a NumPy scalar of a bfloat16 scalar, which is no array to NumPy 2
        return np.asarray(tensor.numpy())


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """Converts an array to a tensor on the host, which shares its memory if DLPack allows it."""
    if array.dtype == object:
        return tf.convert_to_tensor(array, tf.string)
    if array.size == 0 or array.ctypes.data % 64 or not array.flags.writeable:  # not supported by DLPack
        return private.tensor_of(array)
    if array.dtype.kind in _DLPACK_KINDS and array.dtype.isbuiltin == 1:
        return tf.experimental.dlpack.from_dlpack(array.__dlpack__())
    if array.dtype.itemsize == 2 and array.dtype.kind != "b":
        bits = tf.experimental.dlpack.from_dlpack(array.view(np.uint16).__dlpack__())
        return tf.bitcast(bits, tf.as_dtype(array.dtype))
    return private.tensor_of(array)


def unnumbered(name: str) -> str:
    """Returns a name or path without the numbers that TensorFlow and Keras add anywhere in it.

    These numbers differ between processes as soon as one process has traced or built something that another has not.
    """
    return re.sub(r"_+\d+(?=[_/]|$)", "", name)
