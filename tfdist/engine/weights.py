"""Multiplies a process's values by its weight, before they are summed over processes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist.compression.method import segments


def weighted(vector: np.ndarray, weight: float, out: np.ndarray) -> np.ndarray:
    """Multiplies a vector by a weight, in one pass.

    Args:
        vector: floating-point or complex vector, one-dimensional and contiguous; only read.
        weight: the factor; if it is 0 the result is zero, also for NaN and infinity.
        out: array for the result, of the vector's size and dtype.

    Returns:
        ``out``.
    """
    if not weight:
        out.fill(0)
    elif vector.dtype.kind == "c":
        weighted(vector.view(vector.real.dtype), weight, out.view(vector.real.dtype))
    elif vector.dtype.itemsize < 4:  # the dtype would round the weight
        for segment in segments(vector.size):
            out[segment] = vector[segment].astype(np.float32) * np.float32(weight)
    else:
        np.multiply(vector, vector.dtype.type(weight), out=out)
    return out


def checked_weight(weight: tf.Tensor, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns a weight as a float64 scalar.

    Raises:
        ValueError: one of the tensors is not of floating point.
    """
    if not all(tensor.dtype.is_floating or tensor.dtype.is_complex for tensor in tensors):
        raise ValueError(f"a weight needs floating-point or complex tensors; got {[t.dtype.name for t in tensors]}")
    return tf.cast(weight, tf.float64)


def weighted_in_graph(tensor: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
    """Multiplies a tensor by a weight; the result is zero if the weight is zero, also for NaN and infinity."""
    wide = tf.float32 if tensor.dtype.size < 4 else tensor.dtype  # half precision would round the weight
    product = tf.cast(tf.cast(tensor, wide) * tf.cast(weight, wide), tensor.dtype)
    return tf.where(weight != 0, product, tf.zeros_like(tensor))
