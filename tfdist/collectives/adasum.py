"""Adaptive summation: gradients that agree are averaged, those that are orthogonal are added.

Two gradients a and b become (1 - a·b / 2‖a‖²) a + (1 - a·b / 2‖b‖²) b, for each tensor by itself. More than two are
combined in pairs, on the butterfly. Norms and products are summed in float64.

References:
    Maleki et al., Scaling distributed training with adaptive summation, 2020.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tfdist.collectives import butterfly
from tfdist.collectives.schedule import Plan

_SEGMENT = 1 << 15


def all_reduce(buffer: np.ndarray, sizes: Sequence[int], source: np.ndarray | None = None) -> Plan:
    """Combines the buffers of all ranks, on all ranks.

    Args:
        buffer: this rank's tensors, concatenated: floating-point, one-dimensional. Receives the result.
        sizes: number of elements of each tensor.
        source: this rank's tensors, if they are not in the buffer; only read.

    Returns:
        A plan for the engine. Its result is None.

    Raises:
        ValueError: the elements are not floating-point numbers, or sizes do not add up to the buffer's.
    """
    if buffer.dtype.kind in "biuc":
        raise ValueError(f"adaptive summation takes floating-point numbers; got {buffer.dtype}")
    if sum(sizes) != buffer.size:
        raise ValueError(f"sizes of tensors must add up to {buffer.size}; got {list(sizes)}")
    bounds = list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))

    def combine(lower: np.ndarray, upper: np.ndarray, /, *, out: np.ndarray) -> np.ndarray:
        for begin, end in bounds:
            combined(lower[begin:end], upper[begin:end], out[begin:end])
        return out

    return butterfly.all_reduce_whole(buffer, combine, source)


def combined(lower: np.ndarray, upper: np.ndarray, out: np.ndarray) -> None:
    """Combines two tensors adaptively.

    Args:
        lower: tensor of the lower ranks; one-dimensional.
        upper: tensor of the upper ranks; like ``lower``.
        out: receives the result; like ``lower``, and may be either of them.
    """
    product, lower_square, upper_square = (_dot(*pair) for pair in ((lower, upper), (lower, lower), (upper, upper)))
    of_lower = 1 - product / (2 * lower_square) if lower_square else 1.0
    of_upper = 1 - product / (2 * upper_square) if upper_square else 1.0
    for begin in range(0, out.size, _SEGMENT):
        part = slice(begin, begin + _SEGMENT)
        out[part] = of_lower * lower[part].astype(np.float64) + of_upper * upper[part].astype(np.float64)


def _dot(vector: np.ndarray, other: np.ndarray) -> float:
    """Returns the dot product, without a BLAS.

    All ranks need the same bits, and the result of a BLAS may depend on where arrays lie in memory.
    """
    parts = (slice(begin, begin + _SEGMENT) for begin in range(0, vector.size, _SEGMENT))
    return float(sum(float((vector[part].astype(np.float64) * other[part]).sum()) for part in parts))
