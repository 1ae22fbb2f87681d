"""Rows of several variables as one message of bytes: their numbers, the rows, and their indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from tfdist.engine.weights import weighted

_ALIGNMENT = 16
"""Arrays begin at multiples of so many bytes, which is the largest size of an element."""


def pack(
    rows: Sequence[np.ndarray], indices: Sequence[np.ndarray], factor: float | None, take: Callable[[int], np.ndarray]
) -> np.ndarray:
    """Returns a message.

    Args:
        rows: rows of each variable, of shape ``(n, width)``.
        indices: indices of each variable's rows, of shape ``(n,)``.
        factor: number that floating-point rows are multiplied by; None leaves them as they are.
        take: function that returns memory for a number of bytes.
    """
    counts = np.array([len(each) for each in rows], np.int64)
    arrays = [counts, *rows, *indices]
    message = take(sum(_padded(array.nbytes) for array in arrays))
    rooms = _views(message, ((array.dtype, array.shape) for array in arrays))
    for place, (array, room) in enumerate(zip(arrays, rooms, strict=True)):
        if factor is not None and 0 < place <= len(rows):
            weighted(array.reshape(-1), factor, room.reshape(-1))
        else:
            room[...] = array
    return message


def unpack(message: np.ndarray, rows: Sequence[np.ndarray], indices: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the arrays of a message, as views.

    Args:
        message: message of any process, for the same variables.
        rows: for each variable, rows that have the dtype and width.
        indices: for each variable, indices that have the dtype.

    Returns:
        The rows of each variable, and then the indices of each.
    """
    (counts,) = _views(message, [(np.dtype(np.int64), (len(rows),))])
    lengths, likes = 2 * counts.tolist(), [*rows, *indices]
    forms = ((like.dtype, (length, *like.shape[1:])) for length, like in zip(lengths, likes, strict=True))
    return list(_views(message[_padded(counts.nbytes) :], forms))


def _views(message: np.ndarray, forms: Iterable[tuple[np.dtype, tuple[int, ...]]]) -> Iterator[np.ndarray]:
    """Yields arrays of some dtypes and shapes that follow each other in a message."""
    begin = 0
    for dtype, shape in forms:
        nbytes = math.prod(shape) * dtype.itemsize
        yield message[begin : begin + nbytes].view(dtype).reshape(shape)
        begin += _padded(nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
