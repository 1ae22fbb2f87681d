"""Methods that send a few of the elements, and nothing of the others."""

from __future__ import annotations

import struct
from collections.abc import Generator
from dataclasses import dataclass

import numpy as np

from tfdist.compression import sparse
from tfdist.compression.method import Method, Route, saturate
from tfdist.compression.payload import HEADER_BYTES
from tfdist.compression.state import State

_HEAD = struct.Struct("<QQ")


def check_ratio(ratio: float) -> None:
    """Checks that a ratio is a fraction of the elements.

    Raises:
        ValueError: ``ratio`` is not above 0 and at most 1.
    """
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio must be a fraction of the elements, above 0 and at most 1; got {ratio}")


def wanted(ratio: float, elements: int) -> int:
    """Returns the number of elements to send, of ``elements``; at least one."""
    return min(elements, max(1, round(ratio * elements)))


class Sparsifier(Method):
    """Sends some elements uncompressed, with encoded indices."""

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Sets the elements that were sent; see `Method`."""
        indices, rest = sparse.unpack(body, out.size)
        sparse.scatter(out, indices, sparse.values_of(rest, out.dtype, indices.size), combine)


def estimated_bytes(ratio: float, elements: int) -> float:
    """Returns the estimated size of a sparse payload: a geometric gap has log2(e / ratio) bits of entropy."""
    return HEADER_BYTES + 29 + wanted(ratio, elements) * (4 + np.log2(np.e / ratio) / 8)


@dataclass(frozen=True)
class TopK(Sparsifier):
    """The elements of the largest magnitude; 79 × at 1 %. Biased, not linear.

    The selection is exact: a bound estimated from a sample only narrows it down.

    Args:
        ratio: the fraction of the elements that is sent.

    Raises:
        ValueError: ``ratio`` is not above 0 and at most 1.

    References:
        Aji and Heafield, Sparse communication for distributed gradient descent, 2017.
    """

    ratio: float = 0.01
    number = 10

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload; see `Method`."""
        return estimated_bytes(self.ratio, elements)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the elements of the largest magnitude; see `Method`."""
        indices = sparse.largest(vector, wanted(self.ratio, vector.size))
        return sparse.pack(indices, vector.size, vector[indices])


@dataclass(frozen=True)
class Threshold(Sparsifier):
    """The elements of at least a given magnitude. Biased, not linear.

    Args:
        tau: the magnitude, above zero.

    Raises:
        ValueError: ``tau`` is not above zero.
    """

    tau: float
    number = 11

    def __post_init__(self) -> None:
        if not self.tau > 0:
            raise ValueError(f"tau must be above 0; got {self.tau}")

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload if 1 % is sent; they depend on the data."""
        return estimated_bytes(0.01, elements)

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the elements that reach ``tau``; see `Method`."""
        indices = sparse.at_least(vector, self.tau)
        return sparse.pack(indices, vector.size, vector[indices])


@dataclass(frozen=True)
class RandomK(Method):
    """A random one of every 1/ratio consecutive elements, multiplied by 1/ratio; 100 × at 1 %. Unbiased and linear.

    All ranks draw the same elements from a shared seed, so only values are sent, and can be summed. Drawing one element
    from each stretch, rather than from the whole vector, needs no search for duplicates and has the same variance for
    every element.

    Args:
        ratio: the fraction of the elements that is sent.

    Raises:
        ValueError: ``ratio`` is not above 0 and at most 1.

    References:
        Wangni et al., Gradient sparsification for communication-efficient distributed optimization, 2018; Stich et
        al., Sparsified SGD with memory, 2018.
    """

    ratio: float = 0.01
    number = 12
    unbiased = True
    route = Route.ALL_REDUCE

    def __post_init__(self) -> None:
        check_ratio(self.ratio)

    def payload_bytes(self, elements: int) -> float:
        """Returns the bytes of a payload; see `Method`."""
        return HEADER_BYTES + _HEAD.size + 4 * wanted(self.ratio, elements)

    def variance(self, elements: int) -> float:
        """Returns the length of the longest stretch minus 1; see `Method`."""
        return -(-elements // wanted(self.ratio, elements)) - 1

    def rounds(self, vector: np.ndarray, state: State) -> Generator[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Sums the drawn elements over all ranks; see `Method`."""
        payload = self.pack(vector, state)
        total = yield payload[_HEAD.size :].view(vector.dtype).copy()
        return np.concatenate([payload[: _HEAD.size], total.view(np.uint8)]), payload

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes the drawn elements; the body is the indices' seed and count, and the values. See `Method`."""
        entropy = int(state.generator(shared=True).integers(1 << 63))
        count = wanted(self.ratio, vector.size)
        indices, _ = _one_of_each(vector.size, count, entropy)
        head = np.frombuffer(_HEAD.pack(entropy, count), np.uint8)
        return np.concatenate([head, vector[indices].view(np.uint8)])

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Multiplies the values by the lengths of their stretches; see `Method`."""
        entropy, count = _HEAD.unpack(body[: _HEAD.size].tobytes())
        indices, stretches = _one_of_each(out.size, count, entropy)
        with np.errstate(over="ignore"):  # multiplied after summing, so that sums do not overflow
            values = saturate(sparse.values_of(body[_HEAD.size :], out.dtype, count) * stretches)
        sparse.scatter(out, indices, values, combine)


def _one_of_each(elements: int, count: int, entropy: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a random index from each of ``count`` stretches, and the lengths of the stretches (float32)."""
    bounds = np.arange(count + 1) * elements // count
    lengths = np.diff(bounds)
    draws = np.random.Generator(np.random.SFC64(entropy)).random(count)
    return bounds[:-1] + (draws * lengths).astype(np.int64), lengths.astype(np.float32)


@dataclass(frozen=True)
class DeepGradientCompression(Sparsifier):
    """The elements of the largest magnitude of the gradient with momentum; 680 × at 0.1 %. Biased, not linear.

    Momentum is applied before elements are chosen (momentum correction) and accumulated in the residual until it is
    sent. Elements that are sent are set to zero in the residual and the velocity (factor masking). If all elements are
    sent, nothing is delayed, and the velocity is kept. Train with an optimizer *without* momentum, because this method
    applies it. Variables of that optimizer that are not compressed, such as biases, get the same momentum. The method
    also keeps its own residual.

    Args:
        ratio: the fraction of the elements that is sent after the warm-up.
        momentum: the momentum of the optimizer that this replaces; 0 for none.
        clip_norm: the norm that each tensor's gradient is clipped to, over all ranks: each rank clips its own to
            ``clip_norm`` divided by the square root of the number of ranks. No clipping by default.
        warmup_steps: the number of steps of each stage of the warm-up, which sends 25 % of the elements in the first
            stage, 6.25 % in the second, and so on down to ``ratio``. 0 for no warm-up.

    Raises:
        ValueError: an argument is out of range.

    References:
        Lin et al., Deep gradient compression: reducing the communication bandwidth for distributed training, 2018.
    """

    ratio: float = 0.001
    momentum: float = 0.9
    clip_norm: float | None = None
    warmup_steps: int = 0
    number = 13
    keeps_residual = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1; got {self.momentum}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm must be above 0; got {self.clip_norm}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0; got {self.warmup_steps}")

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload after the warm-up; see `Method`."""
        return estimated_bytes(self.ratio, elements)

    def ratio_at(self, step: int) -> float:
        """Returns the fraction that is sent in a step, counted from the first step with this method."""
        if not self.warmup_steps:
            return self.ratio
        return max(self.ratio, 0.25 ** (1 + step // self.warmup_steps))

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Applies clipping and momentum, and encodes the largest elements of the residual; see `Method`."""
        if self.clip_norm is not None:
            norm = float(np.linalg.norm(vector, np.inf))
            norm *= float(np.linalg.norm(vector / vector.dtype.type(norm))) if norm else 0.0
            bound = self.clip_norm / state.size**0.5
            vector = vector * vector.dtype.type(bound / norm) if norm > bound else vector
        residual = state.array("residual", vector)
        if self.momentum:
            velocity = state.array("velocity", vector)
            velocity *= vector.dtype.type(self.momentum)
            velocity += vector
            residual += saturate(velocity)
        else:
            residual += vector
        saturate(residual)
        begun = state.arrays.setdefault("begun", np.array(state.step))
        count = wanted(self.ratio_at(state.step - int(begun)), vector.size)
        indices = sparse.largest(residual, count)
        body = sparse.pack(indices, vector.size, residual[indices])
        residual[indices] = 0
        if self.momentum and count < vector.size:
            velocity[indices] = 0
        return body
