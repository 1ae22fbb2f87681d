"""The base of compression methods, which encode a vector in fewer bytes and decode it."""

from __future__ import annotations

import abc
import enum
from collections.abc import Generator, Sequence

import numpy as np

from tfdist.compression import payload as payloads
from tfdist.compression.payload import Payload
from tfdist.compression.state import State
from tfdist.errors import PayloadError


class Route(enum.Enum):
    """How the vectors of all processes are added."""

    ALL_REDUCE = "all-reduce"
    """Encodings add up like the vectors themselves, so any all-reduce can sum them."""

    EXCHANGE = "exchange"
    """Each rank receives the same part of every vector, adds the parts, and encodes the sum again: a reduce-scatter by
    one exchange of payloads, then an all-gather. For methods whose payload size depends only on the number of
    elements."""

    GATHER = "gather"
    """Every rank receives the payloads of all ranks and adds them."""


class Described:
    """An object whose ``repr`` shows its arguments and no address, because processes compare it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Method(Described, abc.ABC):
    """A compression method. It is immutable; the state of each tensor is a `State`.

    The docstring of a subclass states its compression ratio (such as 4 ×), its source, whether it is unbiased and
    whether it is linear.

    Attributes:
        number: identifies the method in the headers of payloads; numbers below 128 are tfdist's own.
        unbiased: whether the mean over many encodings of a vector is the vector.
        route: how the vectors of all processes are added.
        keeps_residual: whether the method itself keeps a residual.
        votes: whether `merge` counts votes, so that the sum has no residual.
        momentum: the momentum that the method applies in place of the optimizer, which must have none; 0 for none. The
            optimizer's other variables, with other methods or none, get the same momentum (`Compressor`).
    """

    number: int = 255
    unbiased: bool = False
    route: Route = Route.GATHER
    keeps_residual: bool = False
    votes: bool = False
    momentum: float = 0.0

    @property
    def linear(self) -> bool:
        """Whether the decoded sum of encodings is the sum of the decoded ones."""
        return self.route is Route.ALL_REDUCE

    @property
    def needs_feedback(self) -> bool:
        """Whether strategies add `ErrorFeedback`: to biased methods that keep no residual themselves."""
        return not self.unbiased and not self.keeps_residual

    @abc.abstractmethod
    def pack(self, vector: np.ndarray, state: State) -> np.ndarray:
        """Encodes a finite vector, without a header.

        Args:
            vector: float32 or float64, one-dimensional, at least one element; only read.
            state: the tensor's state.

        Returns:
            Bytes (uint8).
        """

    @abc.abstractmethod
    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Decodes the bytes of `pack`.

        Args:
            body: encoded vector (uint8).
            out: receives the vector; of its size.
            combine: ``np.add`` or ``np.subtract``, to combine the vector with ``out`` instead of overwriting it.
        """

    def payload_bytes(self, elements: int) -> float:
        """Returns the estimated bytes of a payload, with header, of a float32 vector; by default uncompressed."""
        return payloads.HEADER_BYTES + 4 * elements

    def expected_ratio(self, elements: int) -> float:
        """Returns the estimated compression ratio: the bytes of float32 divided by those of a payload with header."""
        return 4 * elements / self.payload_bytes(elements)

    def variance(self, elements: int) -> float:
        """Returns a bound on E‖decoded − x‖² / ‖x‖² for an unbiased method; 0 for others if it is unknown."""
        return 0.0

    def encode(self, vector: np.ndarray, state: State | None = None) -> np.ndarray:
        """Encodes a vector, with a header.

        A vector with NaN or infinity is not encoded: `decode` then returns NaN for every element, and the state does
        not change.

        Args:
            vector: floating-point, one-dimensional; float16 and bfloat16 are converted to float32.
            state: the tensor's state; by default that of the first step of a single process.

        Returns:
            A payload (uint8).
        """
        vector = as_working(vector)
        body: np.ndarray | None = np.empty(0, np.uint8)
        if not is_finite(vector):
            body = None
        elif vector.size:
            body = self.pack(vector, state if state is not None else State())
        return payloads.write(Payload(self.number, vector.dtype, vector.size, body))

    def encode_zeros(self, elements: int, dtype: np.dtype, state: State) -> np.ndarray:
        """Encodes zeros, with a new state."""
        return self.encode(np.zeros(elements, dtype), State(shape=state.shape))

    def granule(self, shape: tuple[int, ...] | None) -> int:
        """Returns the number of consecutive elements of a tensor that must go to the same rank on `Route.EXCHANGE`."""
        return 1

    def decode(self, payload: np.ndarray, out: np.ndarray | None = None, combine: np.ufunc | None = None) -> np.ndarray:
        """Decodes a payload.

        Args:
            payload: the bytes that `encode` returned.
            out: receives the vector; of its size. A new array by default.
            combine: ``np.add`` or ``np.subtract``, to combine the vector with ``out`` instead of overwriting it.

        Returns:
            The vector, one-dimensional.

        Raises:
            PayloadError: the payload is truncated or corrupted, or of another method, size or dtype.
        """
        content = payloads.read(payload, self.number, None if out is None else out.size)
        if out is None:
            out = np.empty(content.elements, content.dtype)
        elif out.dtype != content.dtype:
            raise PayloadError(f"the payload holds a vector of {content.dtype}; expected {out.dtype}, as on this rank")
        if content.body is None:
            out.fill(np.nan)
        elif out.size:
            self.unpack(content.body, out, combine)
        return out

    def merge(self, encoded: Sequence[np.ndarray], elements: int, dtype: np.dtype, state: State) -> np.ndarray:
        """Adds the vectors of several payloads, for `Route.EXCHANGE`.

        Args:
            encoded: payloads, in the order of the ranks.
            elements: the number of elements of each vector.
            dtype: float32 or float64.
            state: the state of the sum.

        Returns:
            The payload of the sum.
        """
        total = np.zeros(elements, dtype)
        for place, payload in enumerate(encoded):
            self.decode(payload, total, np.add if place else None)
        return self.encode(saturate(total), state)

    def scalers(self, vector: np.ndarray, state: State) -> np.ndarray | None:
        """Returns scalers whose element-wise maximum over all ranks is computed before encoding, for `Route.GATHER`.

        `pack` reads the maximum from ``state.scalers``.

        Args:
            vector: finite vector, as for `pack`.
            state: the tensor's state.

        Returns:
            A one-dimensional array, finite and not negative, of the same length and dtype on all ranks; or None if the
            method has no scalers.
        """
        return None

    def rounds(self, vector: np.ndarray, state: State) -> Generator[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Yields vectors to be summed over all ranks, and is sent the sums, for `Route.ALL_REDUCE`.

        Args:
            vector: finite vector, as for `pack`.
            state: the tensor's state, in the same step on all ranks.

        Returns:
            The bodies of two payloads: of the sum, and of this rank's contribution to it.
        """
        raise TypeError(f"{self!r} has no rounds: its route must be {Route.ALL_REDUCE}; got {self.route}")


def as_working(vector: np.ndarray) -> np.ndarray:
    """Converts a vector to the form that methods accept: contiguous, and float32 unless it is float64."""
    dtype = vector.dtype if vector.dtype in (np.float32, np.float64) else np.float32
    return np.ascontiguousarray(vector, dtype)


def is_finite(vector: np.ndarray) -> bool:
    """Returns whether a vector has no NaN and no infinity."""
    with np.errstate(all="ignore"):
        # A sum is fast, and not finite if any element is not; but it may also overflow, so then check each element.
        return bool(np.isfinite(vector.sum())) or bool(np.isfinite(vector).all())


def saturate(vector: np.ndarray) -> np.ndarray:
    """Replaces infinities in place by the largest number of their sign; NaN stays. Returns the vector."""
    limit = np.finfo(vector.dtype).max
    return vector if is_finite(vector) else np.clip(vector, -limit, limit, out=vector)


def segments(elements: int, length: int = 1 << 14) -> list[slice]:
    """Cuts a number of elements into segments that fit into the cache."""
    return [slice(start, min(start + length, elements)) for start in range(0, elements, length)]


def store(out: np.ndarray, values: np.ndarray, combine: np.ufunc | None) -> None:
    """Combines values with those in ``out``; overwrites them by default."""
    if combine is None:
        out[...] = values
    else:
        combine(out, values, out=out)
