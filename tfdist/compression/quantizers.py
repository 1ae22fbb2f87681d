"""Quantization to a few levels per element, with a scale for every block of elements."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np

from tfdist.compression import payload
from tfdist.compression.bits import pack_levels, unpack_levels
from tfdist.compression.method import Method, Route, segments, store
from tfdist.compression.state import State

_AT_A_TIME = 1 << 15
"""Elements that are processed at a time, so that they fit into the cache."""


class _Quantizer(Method):
    """Encodes each block as a scale and, for each of its elements, a level between ``-most`` and ``most``.

    Attributes:
        block: the number of elements that share a scale.
    """

    block: int
    route = Route.EXCHANGE

    @property
    @abc.abstractmethod
    def most(self) -> int:
        """The highest level."""

    @abc.abstractmethod
    def _scales(self, magnitudes: np.ndarray) -> np.ndarray:
        """Returns the scale of each row: divided by it, all its elements are at most 1."""

    def _rounds_at_random(self) -> bool:
        return True

    def _agreed(self, vector: np.ndarray, state: State) -> np.ndarray | None:
        """Returns the scale of each block, if it does not depend on the block alone; else None."""
        return None

    @property
    def _bits(self) -> int:
        return 8 if self.most > 7 else 4 if self.most > 1 else 2

    def payload_bytes(self, elements: int) -> float:
        """Returns the bytes of a payload; see `Method`."""
        blocks = -(-elements // self.block)
        return payload.HEADER_BYTES + 4 * blocks + -(-elements * self._bits // 8)

    def granule(self, shape: tuple[int, ...] | None) -> int:
        """Returns the size of a block; see `Method`."""
        return self.block

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Quantizes the vector; the body is all scales (float32), followed by all levels, packed. See `Method`."""
        generator = state.generator() if self._rounds_at_random() else None
        scales = np.empty(-(-vector.size // self.block), np.float32)
        levels = np.empty(vector.size, np.int8)
        agreed = self._agreed(vector, state)
        for rows, part in _by_rows(vector, self.block):
            steps = np.abs(part)
            scale = self._scales(steps).astype(np.float32) if agreed is None else agreed[rows]
            # If dividing by a scale would overflow, the block is encoded as zeros.
            scale[scale < np.finfo(np.float32).tiny * self.most] = 0
            scales[rows] = scale
            factors = np.divide(self.most, scale, out=np.zeros_like(scale), where=scale > 0)
            np.multiply(part, factors[:, np.newaxis], out=steps)
            if generator is None:
                np.rint(steps, out=steps)
            else:
                steps += generator.random(steps.shape, dtype=np.float32)
                np.floor(steps, out=steps)
                np.clip(steps, -self.most, self.most, out=steps)  # elements larger than the scale, even by rounding
            span = slice(rows.start * self.block, min(rows.stop * self.block, vector.size))
            levels[span] = steps.reshape(-1)[: span.stop - span.start]
        return np.concatenate([scales.view(np.uint8), pack_levels(levels, self._bits)])

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Multiplies the levels by their scales; see `Method`."""
        count = -(-out.size // self.block)
        scales = np.frombuffer(body[: 4 * count].tobytes(), np.float32) * np.float32(1 / self.most)
        levels = unpack_levels(body[4 * count :], out.size, self._bits)
        whole, many = out.size // self.block, max(1, _AT_A_TIME // self.block)
        for start in range(0, whole, many):
            rows = slice(start, min(start + many, whole))
            span = slice(rows.start * self.block, rows.stop * self.block)
            values = levels[span].reshape(-1, self.block) * scales[rows, np.newaxis]
            store(out[span], values.reshape(-1), combine)
        if whole < count:
            rest = slice(whole * self.block, out.size)
            store(out[rest], levels[rest] * scales[whole], combine)


class _Linearly(_Quantizer):
    """Evenly spaced levels up to the block's largest element, rounded to nearest or at random."""

    stochastic: bool

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether rounding is stochastic."""
        return self.stochastic

    def _rounds_at_random(self) -> bool:
        return self.stochastic

    def _scales(self, magnitudes: np.ndarray) -> np.ndarray:
        return magnitudes.max(1)

    def variance(self, elements: int) -> float:
        """Returns a bound by a quarter of the squared spacing for each element; see `Method`."""
        return min(elements, self.block) / (4 * self.most**2) if self.stochastic else 0.0


@dataclass(frozen=True)
class Int8(_Linearly):
    """255 evenly spaced levels per block; 3.9 ×. Not linear.

    Args:
        block: the number of elements that share a scale.
        stochastic: whether to round at random, which makes it unbiased.

    References:
        Dettmers, 8-bit approximations for parallelism in deep learning, 2016.
    """

    block: int = 256
    stochastic: bool = False
    number = 4

    def __post_init__(self) -> None:
        _check_block(self.block)

    @property
    def most(self) -> int:
        """The highest level, 127."""
        return 127


@dataclass(frozen=True)
class Int4(_Linearly):
    """15 evenly spaced levels per block; 7.1 ×. Not linear.

    Args:
        block: the number of elements that share a scale.
        stochastic: whether to round at random, which makes it unbiased.
    """

    block: int = 64
    stochastic: bool = False
    number = 5

    def __post_init__(self) -> None:
        _check_block(self.block)

    @property
    def most(self) -> int:
        """The highest level, 7."""
        return 7


@dataclass(frozen=True)
class QSGD(_Quantizer):
    """Each element as its sign and one of s levels up to the block's norm, rounded at random. Unbiased, not linear.

    The variance is at most min(n/s², √n/s) ‖x‖² for blocks of n elements and s levels. Levels are written in 2, 4 or
    8 bits, as many as needed; the paper's entropy code is worth its time only for very few levels.

    Args:
        levels: s, the number of levels above zero: 1 to 127.
        block: n, the number of elements that share a norm.

    Raises:
        ValueError: ``levels`` or ``block`` is out of range.

    References:
        Alistarh et al., QSGD: communication-efficient SGD via gradient quantization and encoding, 2017.
    """

    levels: int = 127
    block: int = 512
    number = 6
    unbiased = True

    def __post_init__(self) -> None:
        _check_block(self.block)
        if not 1 <= self.levels <= 127:
            raise ValueError(f"levels must be between 1 and 127; got {self.levels}")

    @property
    def most(self) -> int:
        """The highest level, ``levels``."""
        return self.levels

    def _scales(self, magnitudes: np.ndarray) -> np.ndarray:
        # Divided first, as squares of small or large numbers could under- or overflow. Norms are rounded up, so that
        # no ratio exceeds 1.
        largest = magnitudes.max(1)
        ratios = magnitudes / np.where(largest > 0, largest, 1)[:, np.newaxis]
        norms = np.sqrt(np.einsum("ij,ij->i", ratios, ratios)) * largest
        return np.minimum(np.nextafter(norms.astype(np.float32), np.float32(np.inf)), np.finfo(np.float32).max)

    def variance(self, elements: int) -> float:
        """Returns the paper's bound; see `Method`."""
        block = min(elements, self.block)
        return min(block / self.levels**2, block**0.5 / self.levels)


@dataclass(frozen=True)
class TernGrad(_Quantizer):
    """Each element as -1, 0 or 1 times a scaler, at random. 16 ×. Unbiased except for clipping, not linear.

    Elements are clipped to a number of standard deviations, about zero, of the tensor's gradient. A block's scaler is
    the largest magnitude in it after clipping, on any rank; ranks agree on scalers in a small all-reduce before they
    encode. Payloads are gathered, because quantizing the sum again would add as much noise again. As in the paper there
    is no error feedback: the clipped part is lost.

    Args:
        block: the number of elements that share a scaler; smaller blocks have less noise. The paper uses whole layers.
        clip: the number of standard deviations, 2.5 in the paper; None for no clipping, and so no bias.

    Raises:
        ValueError: ``clip`` is not above zero, or ``block`` is below 1.

    References:
        Wen et al., TernGrad: ternary gradients to reduce communication in distributed deep learning, 2017,
        arXiv:1705.07878 (section 3.2: layer-wise ternarizing, gradient clipping, scaler sharing).
    """

    block: int = 4096
    clip: float | None = 2.5
    number = 7
    route = Route.GATHER
    needs_feedback = False

    def __post_init__(self) -> None:
        _check_block(self.block)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be above 0, or None; got {self.clip}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether nothing is clipped."""
        return self.clip is None

    @property
    def most(self) -> int:
        """The highest level, 1."""
        return 1

    def _scales(self, magnitudes: np.ndarray) -> np.ndarray:
        return magnitudes.max(1)

    def scalers(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Returns the largest magnitude of each block after clipping (float32); see `Method`."""
        largest = np.empty(-(-vector.size // self.block), np.float32)
        for rows, part in _by_rows(vector, self.block):
            largest[rows] = np.maximum(part.max(1), -part.min(1))
        return largest if self.clip is None else np.minimum(largest, self.clip * _deviation(vector), dtype=np.float32)

    def _agreed(self, vector: np.ndarray, state: State) -> np.ndarray:
        return self.scalers(vector, state) if state.scalers is None else state.scalers.copy()

    def variance(self, elements: int) -> float:
        """Returns the bound for a block with its own scaler; see `Method`.

        The variance is largest if one element is 1 and all others are 1 divided by the root of their number. With
        clipping, the scaler is at most ``clip`` standard deviations.
        """
        unclipped = min(elements, self.block) ** 0.5 / 2
        return unclipped if self.clip is None else min(unclipped, self.clip)


def _deviation(vector: np.ndarray) -> float:
    """Returns the standard deviation about zero."""
    largest = float(np.abs(vector).max(initial=0))
    if not largest:
        return 0.0
    # Scaled, so that no square overflows or underflows.
    squares = (
        float(np.square(vector[part] / vector.dtype.type(largest)).sum(dtype=np.float64))
        for part in segments(vector.size)
    )
    return largest * (sum(squares) / vector.size) ** 0.5


def _check_block(block: int) -> None:
    if block < 1:
        raise ValueError(f"block must be at least 1; got {block}")


def _by_rows(vector: np.ndarray, block: int) -> list[tuple[slice, np.ndarray]]:
    """Returns the vector as tables of whole blocks, a few at a time; the last block is padded with zeros."""
    whole, many = vector.size // block, max(1, _AT_A_TIME // block)
    tables = []
    for start in range(0, whole, many):
        rows = slice(start, min(start + many, whole))
        tables.append((rows, vector[rows.start * block : rows.stop * block].reshape(-1, block)))
    if rest := vector.size % block:
        last = np.zeros((1, block), vector.dtype)
        last[0, :rest] = vector[whole * block :]
        tables.append((slice(whole, whole + 1), last))
    return tables
