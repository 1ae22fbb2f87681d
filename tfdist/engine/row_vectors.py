"""Rows of several variables as vectors, one of each dtype, in which they cross to the host and to other processes.

Where rows are few, a tensor that crosses costs more than its data, as each is an object of Python, which TensorFlow's
threads release; so does a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf


@dataclass
class Parts:
    """Rows of a variable, in the order of their parts.

    Attributes:
        rows: elements of the rows, as vectors.
        indices: the rows' indices.
    """

    rows: list[np.ndarray] = field(default_factory=list)
    indices: list[np.ndarray] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of rows."""
        return sum(map(len, self.indices))


@dataclass(frozen=True)
class Layout:
    """Which variables are in which vector.

    A vector of indices begins with the numbers of its variables' rows, as elements.

    Attributes:
        rows: for each vector of rows, the numbers of its variables.
        indices: for each vector of indices, the numbers of its variables.
    """

    rows: list[list[int]]
    indices: list[list[int]]

    def unpack(
        self, vectors: Sequence[np.ndarray], sizes: Sequence[Sequence[int]], widths: Sequence[int]
    ) -> list[Parts]:
        """Returns views of each variable's rows.

        Args:
            vectors: vectors of rows, and then of indices; each has those of all processes, one after another.
            sizes: for each vector, the numbers of elements of each process. One without elements has no rows.
            widths: numbers of elements in a row of each variable.
        """
        parts = [Parts() for _ in widths]
        counts = [[0] * len(widths) for _ in sizes[0]]
        for kind, vector, lengths in zip(self.indices, vectors[len(self.rows) :], sizes[len(self.rows) :], strict=True):
            begin = 0
            for count, length in zip(counts, lengths, strict=True):
                own = vector[begin : begin + length]
                begin, place = begin + length, len(kind)
                for variable, number in zip(kind, own[:place].tolist(), strict=bool(length)):
                    parts[variable].indices.append(own[place : place + number])
                    count[variable], place = number, place + number
        for kind, vector in zip(self.rows, vectors, strict=False):
            if len(kind) == 1:  # its rows follow each other already, and are not to be copied
                parts[kind[0]].rows.append(vector)
                continue
            begin = 0
            for count in counts:
                for variable in kind:
                    end = begin + count[variable] * widths[variable]
                    parts[variable].rows.append(vector[begin:end])
                    begin = end
        return parts

    def pack(
        self, parts: Sequence[Parts], dtypes: Sequence[np.dtype], take: Callable[[int], np.ndarray]
    ) -> list[np.ndarray]:
        """Returns the vectors of rows and of indices, as of one process.

        Args:
            parts: rows of each variable.
            dtypes: dtype of each vector.
            take: function that returns memory for a number of bytes.
        """
        places = iter(dtypes)
        rows = [
            _joined([part for variable in kind for part in parts[variable].rows], next(places), take)
            for kind in self.rows
        ]
        indices = []
        for kind, dtype in zip(self.indices, places, strict=True):
            counts = np.array([parts[variable].count for variable in kind], dtype)
            indices.append(
                _joined([counts, *(part for variable in kind for part in parts[variable].indices)], dtype, take)
            )
        return [*rows, *indices]


class RowVectors:
    """The vectors of some variables, in the graph under construction or eagerly.

    Args:
        slices: rows and indices of each variable, of 32 or 64 bits.

    Attributes:
        layout: which variables are in which vector.
        vectors: vectors of rows, and then of indices.
        widths: int64 vector of the numbers of elements in a row.
    """

    def __init__(self, slices: Sequence[tf.IndexedSlices]) -> None:
        self._slices = slices
        rows, indices = (_by_dtype(tensors) for tensors in zip(*((s.values, s.indices) for s in slices), strict=True))
        self.layout = Layout(rows, indices)
        self.vectors = [
            *(_in_one([tf.reshape(slices[variable].values, [-1]) for variable in kind]) for kind in rows),
            *(_after_their_numbers([slices[variable].indices for variable in kind]) for kind in indices),
        ]
        self.widths = tf.stack([_width(each.values) for each in slices])

    def cut(self, vectors: Sequence[tf.Tensor]) -> list[tf.IndexedSlices]:
        """Returns the rows of each variable in other vectors of this layout.

        Args:
            vectors: vectors of rows, and then of indices.
        """
        rows: dict[int, tf.Tensor] = {}
        indices: dict[int, tf.Tensor] = {}
        heads = []
        for kind, vector in zip(self.layout.indices, vectors[len(self.layout.rows) :], strict=True):
            heads.append(tf.cast(vector[: len(kind)], tf.int64))
            sizes = tf.concat([[len(kind)], heads[-1]], 0)
            indices.update(zip(kind, tf.split(vector, sizes, num=len(kind) + 1)[1:], strict=True))
        counts = tf.gather(_in_one(heads), np.argsort(np.concatenate(self.layout.indices)))
        for kind, vector in zip(self.layout.rows, vectors, strict=False):
            parts = tf.split(vector, tf.gather(counts * self.widths, kind), num=len(kind))
            for variable, part in zip(kind, parts, strict=True):
                rows[variable] = _shaped(part, self._slices[variable].values, counts, variable)
        return [
            tf.IndexedSlices(rows[variable], indices[variable], each.dense_shape)
            for variable, each in enumerate(self._slices)
        ]


def _by_dtype(tensors: Iterable[tf.Tensor]) -> list[list[int]]:
    kinds: dict[tf.DType, list[int]] = {}
    for number, tensor in enumerate(tensors):
        kinds.setdefault(tensor.dtype, []).append(number)
    return list(kinds.values())


def _in_one(vectors: Sequence[tf.Tensor]) -> tf.Tensor:
    return vectors[0] if len(vectors) == 1 else tf.concat(vectors, 0)


def _after_their_numbers(indices: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.concat([tf.cast(tf.stack([tf.size(each) for each in indices]), indices[0].dtype), *indices], 0)


def _joined(parts: Sequence[np.ndarray], dtype: np.dtype, take: Callable[[int], np.ndarray]) -> np.ndarray:
    """Concatenates vectors; a single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    room = take(sum(map(len, parts)) * dtype.itemsize).view(dtype)
    return np.concatenate(parts, out=room) if parts else room


def _width(values: tf.Tensor) -> tf.Tensor:
    """Returns the number of elements of a row as int64, from the static shape if it is known."""
    width = values.shape[1:].num_elements()
    return tf.reduce_prod(tf.shape(values, tf.int64)[1:]) if width is None else tf.constant(width, tf.int64)


def _shaped(vector: tf.Tensor, like: tf.Tensor, counts: tf.Tensor, variable: int) -> tf.Tensor:
    """Returns a variable's rows of a vector, which have the shape of another tensor's rows."""
    if like.shape.rank == 1:
        return vector
    if like.shape[1:].num_elements():  # neither unknown nor zero
        return tf.reshape(vector, [-1, *like.shape[1:]])
    rows = tf.reshape(vector, tf.concat([[counts[variable]], tf.shape(like, tf.int64)[1:]], 0))
    rows.set_shape([None, *like.shape[1:]])
    return rows
