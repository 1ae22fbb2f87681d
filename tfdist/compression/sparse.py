"""Bodies that hold some elements of a vector: their encoded indices, and data about each."""

from __future__ import annotations

import struct

import numpy as np

from tfdist.compression import indices as coding
from tfdist.compression.method import segments
from tfdist.errors import PayloadError

_LENGTH = struct.Struct("<Q")
_SAMPLE = 1 << 16
"""The largest sample from which a bound for the largest elements is estimated."""

_WORTH_IT = 1 << 13
"""The smallest number of elements for which a bound is estimated."""


def pack(indices: np.ndarray, total: int, *about: np.ndarray) -> np.ndarray:
    """Encodes some elements.

    Args:
        indices: ascending indices of the elements.
        total: the number of elements of the vector.
        about: arrays of data about the elements.

    Returns:
        Bytes (uint8).
    """
    coded = coding.encode(indices, total)
    length = np.frombuffer(_LENGTH.pack(len(coded)), np.uint8)
    return np.concatenate([length, coded, *(np.ascontiguousarray(array).view(np.uint8) for array in about)])


def unpack(body: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the indices that `pack` wrote, and the bytes that follow.

    Raises:
        PayloadError: the body is damaged.
    """
    if len(body) < _LENGTH.size:
        raise PayloadError(f"a sparse body has at least {_LENGTH.size} bytes; got {len(body)}")
    (length,) = _LENGTH.unpack(body[: _LENGTH.size].tobytes())
    rest = body[_LENGTH.size :]
    return coding.decode(rest[:length], total), rest[length:]


def values_of(data: np.ndarray, dtype: np.dtype, count: int) -> np.ndarray:
    """Reads values of a dtype from bytes.

    Raises:
        PayloadError: there are not bytes for exactly ``count`` values.
    """
    if len(data) != count * np.dtype(dtype).itemsize:
        raise PayloadError(f"{count} values of {np.dtype(dtype)} were expected; got {len(data)} bytes")
    return np.frombuffer(data.tobytes(), dtype)


def scatter(out: np.ndarray, indices: np.ndarray, values: np.ndarray, combine: np.ufunc | None) -> None:
    """Combines values with some elements of a vector; by default sets them, and the others to zero."""
    if combine is None:
        out.fill(0)
        out[indices] = values
    else:
        out[indices] = combine(out[indices], values)


def at_least(vector: np.ndarray, bound: float) -> np.ndarray:
    """Returns ascending indices (int64) of the elements whose magnitude is at least ``bound``."""
    indices = []
    for segment in segments(vector.size):
        part = vector[segment]
        beyond = np.flatnonzero(np.abs(part) >= bound)
        if beyond.size:
            indices.append(beyond + segment.start)
    return np.concatenate(indices) if indices else np.empty(0, np.int64)


def largest(vector: np.ndarray, count: int) -> np.ndarray:
    """Returns the indices of the elements of the largest magnitude; zeros are never among them.

    A bound is estimated from a sample, slightly too low on purpose; the selection is made among the elements that
    reach it.

    Args:
        vector: a finite vector.
        count: the number of elements wanted.

    Returns:
        Ascending indices (int64); fewer than ``count`` if fewer elements are not zero.

    References:
        Lin et al., Deep gradient compression, 2018 (hierarchical selection).
    """
    smallest = float(np.finfo(vector.dtype).smallest_subnormal)
    bound = max(smallest, _estimated_bound(vector, count))
    candidates = at_least(vector, bound)
    if candidates.size < count and bound > smallest:
        candidates = at_least(vector, smallest)
    if candidates.size <= count:
        return candidates
    chosen = np.argpartition(-np.abs(vector[candidates]), count - 1)[:count]
    return candidates[np.sort(chosen)]


def _estimated_bound(vector: np.ndarray, count: int) -> float:
    """Returns a bound that slightly more elements than wanted are expected to reach."""
    if vector.size < _WORTH_IT:
        return 0.0
    # An odd stride visits all columns of a matrix, whose number is usually even.
    sample = np.abs(vector[:: max(8, vector.size // _SAMPLE) | 1])
    wanted = count / vector.size * sample.size
    place = int(wanted + 4 * wanted**0.5 + 4)
    return float(np.partition(sample, sample.size - place)[sample.size - place]) if place < sample.size else 0.0
