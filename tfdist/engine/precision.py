"""Sums of gradients of half precision in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

_HALF = (tf.float16, tf.bfloat16)


def widened(gradients: Sequence[Any]) -> list[Any]:
    """Returns gradients for a sum: those of half precision in float32, others unchanged.

    Args:
        gradients: tensors or `tf.IndexedSlices`.
    """
    return [tf.cast(gradient, tf.float32) if gradient.dtype in _HALF else gradient for gradient in gradients]


def narrowed(sums: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """Returns sums in the dtypes of the gradients that were summed.

    Args:
        sums: tensors or `tf.IndexedSlices`.
        gradients: the gradients before `widened`, in the same order.
    """
    pairs = zip(sums, gradients, strict=True)
    return [total if total.dtype == gradient.dtype else tf.cast(total, gradient.dtype) for total, gradient in pairs]
