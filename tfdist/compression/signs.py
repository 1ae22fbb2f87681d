"""Methods that send one bit per element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.compression import payload as payloads
from tfdist.compression.method import Method, Route, segments, store
from tfdist.compression.payload import HEADER_BYTES, Payload
from tfdist.compression.state import State

_SHORTEST_COLUMN = 1024
"""The smallest number of elements that share a pair of means, which takes 64 bits."""


@dataclass(frozen=True)
class OneBit(Method):
    """1-bit SGD: each element's sign, decoded as the mean of its column's elements of that sign; 30 ×.

    A column is a contiguous row of a Keras kernel, the weights of one input; short ones are combined until they have
    1024 elements. Biased, not linear; made for `ErrorFeedback`, also on the sum.

    References:
        Seide et al., 1-bit stochastic gradient descent and its application to data-parallel distributed training of
        speech DNNs, 2014.
    """

    number = 8
    route = Route.EXCHANGE

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload; see `Method`."""
        return HEADER_BYTES + 4 + 8 * -(-elements // _SHORTEST_COLUMN) + -(-elements // 8)

    def granule(self, shape: tuple[int, ...] | None) -> int:
        """Returns the length of a column; see `Method`."""
        return _column(shape)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the signs, and the means of each column; see `Method`.

        The body is the length of a column (uint32), two means per column (float32), and the signs.
        """
        column = _column(state.shape)
        count = -(-vector.size // column)
        means = np.empty((count, 2), np.float32)
        signs = np.empty(vector.size, bool)
        many = max(1, (1 << 15) // column)
        share = np.full(column, 1 / column, vector.dtype)  # sums of large numbers could overflow, means do not
        for first in range(0, count, many):
            span = slice(first * column, min((first + many) * column, vector.size))
            rows = _table(vector[span], column)
            positive = rows >= 0
            mean, magnitude = rows @ share / 2, np.abs(rows) @ share / 2
            lengths = np.full(len(rows), column)
            lengths[-1] = span.stop - span.start - (len(rows) - 1) * column
            above = positive.sum(1, dtype=np.int32) - (column - lengths)  # the padding of the last row is positive
            here = means[first : first + len(rows)]
            here[:, 1] = (magnitude + mean) * (column / np.maximum(above, 1))
            here[:, 0] = (mean - magnitude) * (column / np.maximum(lengths - above, 1))
            signs[span] = positive.reshape(-1)[: span.stop - span.start]
        head = np.frombuffer(np.uint32(column).tobytes(), np.uint8)
        return np.concatenate([head, means.reshape(-1).view(np.uint8), np.packbits(signs)])

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Replaces each sign by its column's mean; see `Method`."""
        column = int(np.frombuffer(body[:4].tobytes(), np.uint32)[0])
        count = -(-out.size // column)
        means = np.frombuffer(body[4 : 4 + 8 * count].tobytes(), np.float32).reshape(count, 2)
        low, high = means[:, :1], means[:, 1:]
        signs = np.unpackbits(body[4 + 8 * count :], count=out.size).view(bool)
        many = max(1, (1 << 15) // column)
        for first in range(0, count, many):
            span = slice(first * column, min((first + many) * column, out.size))
            rows = np.where(_table(signs[span], column), high[first : first + many], low[first : first + many])
            store(out[span], rows.reshape(-1)[: span.stop - span.start], combine)


@dataclass(frozen=True)
class SignSGD(Method):
    """Majority vote of the ranks on the sign of each element; 32 ×. Biased, not linear.

    Ties are resolved as alternately positive and negative from element to element, and with the signs reversed in the
    next step.

    Args:
        scaled: whether the signs are multiplied by the mean magnitude of the tensor, summed over the ranks, so that
            learning rates keep their meaning and `ErrorFeedback` applies. If not, the sum is -1 or 1, as in the paper,
            and there is no residual.

    References:
        Bernstein et al., signSGD: compressed optimisation for non-convex problems, 2018; Karimireddy et al., Error
        feedback fixes SignSGD and other gradient compression schemes, 2019.
    """

    scaled: bool = True
    number = 9
    route = Route.EXCHANGE
    votes = True

    @property
    def needs_feedback(self) -> bool:
        """Whether signs are scaled; the paper's form, without scales, has no feedback."""
        return self.scaled

    def payload_bytes(self, elements: int) -> float:
        """Returns the bytes of a payload; see `Method`."""
        return HEADER_BYTES + 4 + -(-elements // 8)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the signs; see `Method`.

        The body is the scale (float32) and one bit per element, set if it is negative. Zeros are alternately positive
        and negative. A rank with only zeros does not vote: its scale is zero.
        """
        scale = _mean_magnitude(vector) if self.scaled else float(vector.any())
        negative = np.packbits(np.signbit(vector))
        zeros = np.packbits(vector == 0)
        if zeros.any():
            negative = (negative & ~zeros) | (zeros & _BY_TURNS[state.step % 2])
        return _signs_body(scale, negative)

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Multiplies the signs by the scale; see `Method`."""
        table = np.float32(_scale(body)) * _OF_BYTES
        for segment in segments(out.size, 1 << 15):
            values = table[body[4:][_bytes_of(segment)]].reshape(-1)[: segment.stop - segment.start]
            store(out[segment], values, combine)

    def merge(self, encoded: Sequence[np.ndarray], elements: int, dtype: np.dtype, state: State) -> np.ndarray:
        """Counts the votes on each sign; see `Method`."""
        voters = []
        for payload in encoded:
            body = payloads.read(payload, self.number, elements).body
            if body is None:
                return payload
            if _scale(body):
                voters.append(body)
        if not voters:
            return self.encode_zeros(elements, dtype, state)
        negative = np.empty(-(-elements // 8), np.uint8)
        for segment in segments(elements, 1 << 15):
            place = _bytes_of(segment)
            negative[place] = _majority([body[4:][place] for body in voters], _BY_TURNS[state.step % 2])
        body = _signs_body(sum(map(_scale, voters)) if self.scaled else 1.0, negative)
        return payloads.write(Payload(self.number, np.dtype(dtype), elements, body))


_OF_BYTES = 1 - 2 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, np.newaxis], axis=1).astype(np.float32)
"""For each byte, the values of its 8 bits: 1, or -1 if the bit is set."""

_BY_TURNS = (np.uint8(0b01010101), np.uint8(0b10101010))
"""Alternating signs of eight zeros or ties, for even and odd steps."""


def _bytes_of(segment: slice) -> slice:
    """Returns the bytes that hold the bits of a segment, which starts at a byte boundary."""
    return slice(segment.start // 8, -(-segment.stop // 8))


def _majority(votes: Sequence[np.ndarray], tied: np.uint8) -> np.ndarray:
    """Returns the bits that are set in most of several bit arrays; those of ``tied`` in case of a tie."""
    if len(votes) == 2:
        first, second = votes
        return (first & second) | ((first ^ second) & tied)
    count = np.zeros(8 * votes[0].size, np.int32)
    for bits in votes:
        count += np.unpackbits(bits)
    packed = np.packbits(2 * count > len(votes))
    return packed if len(votes) % 2 else packed | (np.packbits(2 * count == len(votes)) & tied)


def _mean_magnitude(vector: np.ndarray) -> float:
    """Returns the mean magnitude, computed in segments that fit into the cache."""
    parts = (vector[segment] for segment in segments(vector.size, 1 << 15))
    return sum(float(np.abs(part).sum(dtype=np.float64)) for part in parts) / vector.size


def _signs_body(scale: float, bits: np.ndarray) -> np.ndarray:
    return np.concatenate([np.frombuffer(np.float32(scale).tobytes(), np.uint8), bits])


def _scale(body: np.ndarray) -> float:
    return float(np.frombuffer(body[:4].tobytes(), np.float32)[0]) if body.size else 0.0


def _column(shape: tuple[int, ...] | None) -> int:
    """Returns the smallest multiple of the last axis that is at least the shortest column."""
    last = shape[-1] if shape else 0
    return last * -(-_SHORTEST_COLUMN // last) if last else _SHORTEST_COLUMN


def _table(values: np.ndarray, column: int) -> np.ndarray:
    """Returns columns as the rows of a table; the last is padded with zeros."""
    rows = -(-values.size // column)
    if values.size < rows * column:
        filled = np.zeros(rows * column, values.dtype)
        filled[: values.size] = values
        values = filled
    return values.reshape(rows, column)
