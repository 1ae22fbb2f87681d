"""A process's share of a sum: its vector times a weight."""

from __future__ import annotations

import numpy as np

from tfdist.compression.method import segments


def weighted(vector: np.ndarray, weight: float, out: np.ndarray) -> np.ndarray:
    """Multiplies a vector by a weight, in one pass.

    Args:
        vector: of floating point or complex, one-dimensional and contiguous; only read.
        weight: where it is 0 the result is zero, also of NaN and infinity.
        out: where the result comes to lie; of the vector's size and dtype.

    Returns:
        ``out``.
    """
    if not weight:
        out.fill(0)
    elif vector.dtype.kind == "c":
        weighted(vector.view(vector.real.dtype), weight, out.view(vector.real.dtype))
    elif vector.dtype.itemsize < 4:  # which would round the weight
        for segment in segments(vector.size):
            out[segment] = vector[segment].astype(np.float32) * np.float32(weight)
    else:
        np.multiply(vector, vector.dtype.type(weight), out=out)
    return out
