"""Means over processes that do not overflow if the mean itself is within the range of its dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from tfdist.collectives.algorithms import FINISHING
from tfdist.collectives.schedule import partition
from tfdist.compression.method import is_finite, segments

_SEGMENT = 1 << 15
"""Elements that are divided, and then looked at while they are in the cache: more of them cost fewer calls."""

Summing = Callable[[np.ndarray], np.ndarray]
"""A function that sums a vector over all processes; it may overwrite the vector."""


class Division:
    """Divides a sum on its way, each chunk on the rank that has its sum first; a `tfdist.collectives.ring.Finish`.

    A chunk that has overflowed gets NaN as its first element. So all ranks learn of it without reading all elements.
    The processor tells whether an addition overflows, so none has to look for infinities. NumPy may not set that flag
    when it adds numbers of fewer than 32 bits: of those, all are looked at.

    Args:
        divisor: number that the sum is divided by.
        dtype: floating-point dtype of the sum.

    Attributes:
        divisor: as given.
    """

    def __init__(self, divisor: int, dtype: np.dtype) -> None:
        self.divisor = divisor
        self._is_told = dtype.itemsize >= 4
        self._is_finite, self._overflows = True, False
        self._operation, factor = _operation(divisor)
        self._factor = dtype.type(factor)

    def add(self, own: np.ndarray, incoming: np.ndarray, out: np.ndarray) -> None:
        """Adds two vectors into a third, whose first element becomes NaN if a sum overflows, and remains so."""
        with np.errstate(all="ignore", over="call", call=self._told):
            np.add(own, incoming, out=out)
        if self._overflows:
            out[:1], self._overflows = np.nan, False

    def _told(self, kind: str, flags: int) -> None:
        self._overflows = True

    def finish(self, part: np.ndarray) -> None:
        """Divides a part of the chunk, which one call of `add` has returned."""
        if self._is_told:
            self._is_finite = self._is_finite and math.isfinite(part[0])
            self._operation(part, self._factor, out=part)
        else:
            self._is_finite = _divide(part, self.divisor) and self._is_finite

    def end(self, chunk: np.ndarray) -> None:
        """Marks the chunk if it has overflowed, or if a part begins with an infinity that was given."""
        if not self._is_finite:
            chunk[:1] = np.nan


class Mean:
    """The mean of one array: gives the vector to sum in the array's place, and computes the mean from the sum.

    Floating-point numbers are summed unchanged. If the sum overflows, which all processes detect equally, the numbers
    are divided by a power of two and summed again. So a mean loses no precision, and sends no extra bytes unless it
    overflows. Integers of fewer than 64 bits are summed as int64; 64-bit integers as quotients and remainders.

    Args:
        array: this process's array; only read.
        size: number of processes.

    Attributes:
        summed: one-dimensional, contiguous vector to be summed over all processes; it holds the same number of values
            for each element of the array, in order.
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

    def division(self, algorithm: str) -> Division | None:
        """Returns what divides the sum on its way; None if it has to be divided afterwards.

        Args:
            algorithm: name of the algorithm that sums.
        """
        return Division(self._size, self.summed.dtype) if algorithm in FINISHING and not self._integer else None

    def finished(
        self,
        total: np.ndarray,
        again: Summing,
        anywhere: Callable[[bool], bool] = bool,
        is_divided: bool = False,
    ) -> np.ndarray:
        """Returns the mean of each element, one-dimensional; integers are rounded towards zero.

        Args:
            total: the sum of ``summed``, or this process's part of it; overwritten.
            again: function that sums a vector like ``summed``, and returns the part that corresponds to ``total``.
            anywhere: function that returns whether a condition is true on any process. The default is correct if all
                processes have the same ``total``.
            is_divided: whether a `Division` has divided ``total`` on its way.
        """
        if self._integer:
            return self._rounded(total).astype(self._dtype, copy=False)
        if anywhere(not (self._is_unmarked(total) if is_divided else _divide(total, self._size))):
            scale = 1 << (self._size - 1).bit_length()
            scaled = again(self.summed * self.summed.dtype.type(1 / scale))
            _divide(scaled, self._size / scale)
            np.copyto(total, scaled, where=~np.isfinite(total))
        return total.view(self._dtype)

    def _is_unmarked(self, divided: np.ndarray) -> bool:
        """Returns whether no chunk has overflowed."""
        starts = [part.start for part in partition(divided.size, self._size) if part.start < part.stop]
        return bool(np.isfinite(divided[starts]).all())

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
    """Divides in place; returns whether all elements are finite."""
    if vector.dtype.itemsize < 4:  # the dtype may not represent the divisor
        finite = [_divide_half(vector[segment], divisor) for segment in segments(vector.size)]
        return all(finite)
    operation, factor = _operation(divisor)
    all_finite, number = True, vector.dtype.type(factor)
    with np.errstate(all="ignore"):
        for segment in segments(vector.size, _SEGMENT):
            part = vector[segment]
            operation(part, number, out=part)
            all_finite = all_finite and bool(np.isfinite(part).all())
    return all_finite


def _operation(divisor: float) -> tuple[np.ufunc, float]:
    """Returns what divides: the product with the reciprocal of a power of two has a quotient's bits, in less time."""
    is_power = math.frexp(divisor)[0] == 0.5
    return (np.multiply, 1 / divisor) if is_power else (np.divide, divisor)


def _divide_half(part: np.ndarray, divisor: float) -> bool:
    wide = part.astype(np.float32) / np.float32(divisor)
    part[...] = wide
    return is_finite(wide)
