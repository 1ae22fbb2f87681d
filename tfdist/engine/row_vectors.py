"""Rows of several variables as vectors, one of each dtype, in which they cross to the host and back.

Where rows are few, a tensor that crosses costs more than its data: each is an object of Python, which TensorFlow's
threads release.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

Kinds = list[list[int]]
"""For each vector, the numbers of the tensors in it. Those of n variables' rows come first, then those of indices."""


class RowVectors:
    """The vectors of some variables, in the graph under construction or eagerly.

    Args:
        slices: rows and indices of each variable.

    Attributes:
        kinds: which tensors are in which vector.
        vectors: the vectors.
        counts: int64 vector of the numbers of rows.
        widths: int64 vector of the numbers of elements in a row.
    """

    def __init__(self, slices: Sequence[tf.IndexedSlices]) -> None:
        self._variables = len(slices)
        self._tensors = [*(each.values for each in slices), *(each.indices for each in slices)]
        by_dtype: dict[tuple[bool, tf.DType], list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            by_dtype.setdefault((number < len(slices), tensor.dtype), []).append(number)
        self.kinds: Kinds = list(by_dtype.values())
        self.vectors = [_joined([tf.reshape(self._tensors[number], [-1]) for number in kind]) for kind in self.kinds]
        self.counts = tf.stack([tf.shape(each.values, tf.int64)[0] for each in slices])
        self.widths = tf.cast(tf.stack([_width(each.values) for each in slices]), tf.int64)

    def cut(self, vectors: Sequence[tf.Tensor], counts: tf.Tensor) -> list[tf.Tensor]:
        """Returns the rows of each variable, and then the indices of each, of other vectors of these kinds.

        Args:
            vectors: the vectors.
            counts: int64 vector of their numbers of rows.
        """
        sizes = tf.concat([counts * self.widths, counts], 0)
        results: dict[int, tf.Tensor] = {}
        for kind, vector in zip(self.kinds, vectors, strict=True):
            parts = [vector] if len(kind) == 1 else tf.split(vector, tf.gather(sizes, kind), num=len(kind))
            for number, part in zip(kind, parts, strict=True):
                results[number] = _rows(part, self._tensors[number], counts[number % self._variables])
        return [results[number] for number in range(len(self._tensors))]


def arrays_of(
    kinds: Kinds, vectors: Sequence[np.ndarray], counts: Sequence[int], widths: Sequence[int]
) -> list[np.ndarray]:
    """Returns the rows of each variable, of shape ``(count, width)``, and then the indices of each, as views.

    Args:
        kinds: which arrays are in which vector.
        vectors: the vectors.
        counts: number of rows of each variable.
        widths: number of elements of each variable's row.
    """
    shapes = [*zip(counts, widths, strict=True), *((count,) for count in counts)]
    results: dict[int, np.ndarray] = {}
    for kind, vector in zip(kinds, vectors, strict=True):
        ends = np.cumsum([np.prod(shapes[number], dtype=np.int64) for number in kind])
        for number, part in zip(kind, np.split(vector, ends[:-1]), strict=True):
            results[number] = part.reshape(shapes[number])
    return [results[number] for number in range(len(shapes))]


def parts_of(kinds: Kinds, parts: Sequence[Sequence[np.ndarray]]) -> Iterator[list[np.ndarray]]:
    """Yields the parts of each vector.

    Args:
        kinds: which arrays are in which vector.
        parts: parts of each array.
    """
    for kind in kinds:
        yield [part.reshape(-1) for number in kind for part in parts[number]]


def _joined(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)


def _width(values: tf.Tensor) -> Any:
    """Returns the number of elements of a row, from the static shape if it is known."""
    width = values.shape[1:].num_elements()
    return tf.reduce_prod(tf.shape(values, tf.int64)[1:]) if width is None else tf.constant(width, tf.int64)


def _rows(vector: tf.Tensor, like: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Returns rows of a vector, which have the shape of another tensor's rows."""
    if like.shape.rank == 1:
        return vector
    if like.shape[1:].num_elements():  # neither unknown nor zero
        return tf.reshape(vector, [-1, *like.shape[1:]])
    rows = tf.reshape(vector, tf.concat([[count], tf.shape(like, tf.int64)[1:]], 0))
    rows.set_shape([None, *like.shape[1:]])
    return rows
