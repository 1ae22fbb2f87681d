"""Means over processes, which do not overflow where the mean itself is within the range of its dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tfdist.compression.method import is_finite, segments

Summing = Callable[[np.ndarray], np.ndarray]
"""Sums a vector over all processes; may overwrite it."""


class Mean:
    """One array's mean: what to sum in its place, and what to make of the sum.

    Numbers of floating point are summed as they are. Where that overflows, which all processes see alike, they are
    summed once more, divided by a power of two; so a mean costs no precision and, but then, no bytes. Integers of fewer
    than 64 bits are summed as int64, those of 64 bits as their quotients and remainders.

    Args:
        array: what this process gives; only read.
        size: number of processes.

    Attributes:
        summed: what is to be summed over all processes, one-dimensional and contiguous; for each element of the array,
            in their order, as many numbers.
    """

    def __init__(self, array: np.ndarray, size: int) -> None:
        self._dtype, self._size = array.dtype, size
        self._integer = array.dtype.kind in "iu"
        vector = np.ascontiguousarray(array).reshape(-1)
        if not self._integer:
            self.summed = vector.view(vector.real.dtype) if array.dtype.kind == "c" else vector
        elif array.dtype.itemsize < 8:
            self.summed = vector.astype(np.int64)
        else:
            self.summed = np.stack(np.divmod(vector, vector.dtype.type(size)), axis=-1).reshape(-1)

    def finished(self, total: np.ndarray, again: Summing, anywhere: Callable[[bool], bool] = bool) -> np.ndarray:
        """The mean of each element, one-dimensional; of integers, rounded towards zero.

        Args:
            total: the sum of ``summed``, or this process's part of it; overwritten.
            again: sums a vector like ``summed`` once more, and returns what corresponds to ``total``.
            anywhere: whether something is true on any process; of processes whose ``total`` is the same, on this one.
        """
        if self._integer:
            return self._rounded(total).astype(self._dtype, copy=False)
        if anywhere(not _divide(total, self._size)):
            scale = 1 << (self._size - 1).bit_length()
            scaled = again(self.summed * self.summed.dtype.type(1 / scale))
            _divide(scaled, self._size / scale)
            np.copyto(total, scaled, where=~np.isfinite(total))
        return total.view(self._dtype)

    def _rounded(self, total: np.ndarray) -> np.ndarray:
        if self._dtype.itemsize < 8:
            mean, rest = np.divmod(total, self._size)
        else:
            quotients, remainders = total.reshape(-1, 2).T
            more, rest = np.divmod(remainders, remainders.dtype.type(self._size))
            mean = quotients + more
        if self._dtype.kind == "i":
            mean += (mean < 0) & (rest > 0)
        return mean


def _divide(vector: np.ndarray, divisor: float) -> bool:
    """Divides in place; whether all is finite."""
    finite = True
    for segment in segments(vector.size):
        part = vector[segment]
        if part.dtype.itemsize < 4:  # which may not hold the divisor
            wide = part.astype(np.float32) / np.float32(divisor)
            part[...] = wide
        else:
            wide = np.divide(part, part.dtype.type(divisor), out=part)
        finite = finite and is_finite(wide)
    return finite
