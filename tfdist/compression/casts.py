"""Fewer bits per element: 16- and 8-bit floating point."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tfdist.compression import payload
from tfdist.compression.method import Method, Route, segments, store
from tfdist.compression.state import State

_SEGMENT = 1 << 18
"""Elements per call: enough that the overhead of calling TensorFlow is negligible."""


_WORTH_A_CALL = 1 << 15
"""Elements from which TensorFlow's casts of float16 and float8 are faster than NumPy's, including the call."""

_LARGEST_EXPONENT = 120
"""The largest exponent of a scale, so that both the scale and its inverse are float32 numbers."""


class _Cast(Method):
    """A cast to a narrower floating-point type.

    Attributes:
        stochastic: whether to round up or down at random, so that the mean is exact, instead of to nearest.
    """

    stochastic: bool
    route = Route.EXCHANGE

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        """Whether rounding is stochastic."""
        return self.stochastic

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """The narrower type."""

    def payload_bytes(self, elements: int) -> float:
        """Returns the bytes of a payload; see `Method`."""
        return payload.HEADER_BYTES + elements * self.dtype.itemsize

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Casts the vector; finite values beyond the type's range become its largest. See `Method`."""
        return self._narrowed(vector, state)

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Casts the numbers back; see `Method`."""
        narrow = body.view(self.dtype)
        for segment in segments(out.size, _SEGMENT):
            store(out[segment], _cast(narrow[segment], out.dtype), combine)

    def _narrowed(self, vector: np.ndarray, state: State, factor: float = 1.0) -> np.ndarray:
        body = np.empty(vector.size * self.dtype.itemsize, np.uint8)
        narrow = body.view(self.dtype)
        generator = state.generator() if self.stochastic else None
        largest = vector.dtype.type(ml_dtypes.finfo(self.dtype).max)
        within = _largest(vector) * vector.dtype.type(factor) <= largest
        for segment in segments(vector.size, _SEGMENT):
            wide = vector[segment]
            if factor != 1:
                wide = wide * vector.dtype.type(factor)
            if generator is not None:
                small = segments(wide.size)
                wide = np.concatenate([round_stochastically(wide[part], self.dtype, generator) for part in small])
            if not within or generator is not None:
                wide = np.clip(wide, -largest, largest)
            narrow[segment] = _cast(wide, self.dtype)
        return body


@dataclass(frozen=True)
class Float16(_Cast):
    """Half precision: 11 significant bits, from 6e-8 to 65504; 2 ×. Not linear, as sums are rounded again.

    Args:
        stochastic: whether to round at random, which makes it unbiased.

    References:
        Gupta et al., Deep learning with limited numerical precision, 2015 (stochastic rounding).
    """

    stochastic: bool = False
    number = 1
    dtype = np.dtype(np.float16)


@dataclass(frozen=True)
class BFloat16(_Cast):
    """Brain floating point: 8 significant bits, the range of float32; 2 ×. Not linear, as sums are rounded again.

    Args:
        stochastic: whether to round at random, which makes it unbiased.

    References:
        Kalamkar et al., A study of bfloat16 for deep learning training, 2019.
    """

    stochastic: bool = False
    number = 2
    dtype = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Float8(_Cast):
    """8-bit floating point, scaled by a power of two so that the largest element is within its range; 4 ×.

    Not linear, as sums are rounded again.

    Args:
        format: ``"e4m3"``, with 4 significant bits over a range of 2^17; or ``"e5m2"``, with 3 over 2^31.
        stochastic: whether to round at random, which makes it unbiased.

    Raises:
        ValueError: ``format`` is neither of these.

    References:
        Micikevicius et al., FP8 formats for deep learning, 2022.
    """

    format: str = "e4m3"
    stochastic: bool = False
    number = 3

    def __post_init__(self) -> None:
        if self.format not in ("e4m3", "e5m2"):
            raise ValueError(f"format must be 'e4m3' or 'e5m2'; got {self.format!r}")

    @property
    def dtype(self) -> np.dtype:
        """The 8-bit type of the format."""
        return np.dtype(ml_dtypes.float8_e4m3fn if self.format == "e4m3" else ml_dtypes.float8_e5m2)

    def payload_bytes(self, elements: int) -> float:
        """Returns the bytes of a payload with its scale; see `Method`."""
        return super().payload_bytes(elements) + 4

    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Scales and casts the vector; the body begins with the exponent of the scale (int32). See `Method`."""
        exponent = 0
        if (largest := float(_largest(vector))) > 0:
            exponent = math.floor(math.log2(float(ml_dtypes.finfo(self.dtype).max) / largest))
        exponent = max(-_LARGEST_EXPONENT, min(exponent, _LARGEST_EXPONENT))
        head = np.frombuffer(np.int32(exponent).tobytes(), np.uint8)
        return np.concatenate([head, self._narrowed(vector, state, 2.0**exponent)])

    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Casts the numbers back and undoes the scaling; see `Method`."""
        exponent = int(np.frombuffer(body[:4].tobytes(), np.int32)[0])
        limit = np.finfo(out.dtype).max
        with np.errstate(over="ignore", invalid="ignore"):  # some codes that are never written are not finite
            table = np.arange(256, dtype=np.uint8).view(self.dtype).astype(out.dtype) * out.dtype.type(2.0**-exponent)
        np.clip(table, -limit, limit, out=table)  # the largest numbers may have been rounded up
        codes = body[4:]
        for segment in segments(out.size):
            store(out[segment], table[codes[segment]], combine)


def round_stochastically(vector: np.ndarray, dtype: np.dtype, generator: np.random.Generator) -> np.ndarray:
    """Rounds each element up or down to a number of a narrower type, with the exact value as the mean.

    Args:
        vector: float32 or float64.
        dtype: a narrower floating-point type.
        generator: a random number generator.
    """
    limits = ml_dtypes.finfo(dtype)
    word = np.dtype(f"u{vector.itemsize}")
    dropped = np.finfo(vector.dtype).nmant - limits.nmant
    noise = np.frombuffer(generator.bytes(vector.nbytes), word) & word.type((1 << dropped) - 1)
    # The bits of floats are ordered like their magnitudes: adding random bits below the last kept bit carries into it.
    bits = (vector.view(word) + noise) & ~word.type((1 << dropped) - 1)
    rounded = bits.view(vector.dtype)
    if limits.minexp == np.finfo(vector.dtype).minexp:
        return rounded
    smallest_normal = vector.dtype.type(2.0**limits.minexp)
    subnormal = np.flatnonzero(np.abs(vector) < smallest_normal)
    if subnormal.size:  # evenly spaced in the narrower type, but not in the wider one
        spacing = vector.dtype.type(2.0 ** (limits.minexp - limits.nmant))
        chances = noise[subnormal].astype(vector.dtype) * vector.dtype.type(2.0**-dropped)
        rounded[subnormal] = np.floor(vector[subnormal] / spacing + chances) * spacing
    return rounded


def _largest(vector: np.ndarray) -> np.floating:
    return max(vector.max(), -vector.min())


def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Casts with the faster library. NumPy casts bfloat16 as fast as TensorFlow, whose calls cost 0.2 ms."""
    if array.size < _WORTH_A_CALL or ml_dtypes.bfloat16 in (array.dtype, dtype):
        return array.astype(dtype)
    import tensorflow as tf

    from tfdist.tensors import to_tensor

    with tf.device("CPU:0"):
        return np.asarray(tf.cast(to_tensor(array), tf.as_dtype(dtype)))
