"""What every compression method is: a way to write a vector down in fewer bytes, and to read it again."""

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
    """What is sent adds up like the vectors themselves: any all-reduce."""

    EXCHANGE = "exchange"
    """Each rank gets the same part of every vector, adds, and encodes the sum once more: reduce-scatter with one
    exchange of payloads, then an all-gather. For methods whose payloads of so many elements are always equally long."""

    GATHER = "gather"
    """Every rank gets the payload of every other and adds them all."""


class Described:
    """An object whose ``repr`` says what it was made with, and no address: processes compare it."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


class Method(Described, abc.ABC):
    """A compression method. It is never changed; what it keeps of a tensor is in a `State`.

    Subclasses say in their docstring whose method it is, whether it is unbiased and whether it is linear.

    Attributes:
        number: in the headers of payloads; those below 128 are tfdist's own.
        unbiased: whether the mean over many encodings of a vector is the vector.
        route: how processes add.
        keeps_residual: whether the method itself keeps what it does not send.
        votes: whether `merge` counts votes, and so leaves nothing of the sum unsent.
        momentum: that the method applies in place of the optimizer, which is to have none; 0 where it applies none.
            Variables of the same optimizer that other methods are for, or none, get as much (`Compressor`).
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
        """Writes a finite vector down.

        Args:
            vector: float32 or float64, one-dimensional, at least one element; only read.
            state: of the tensor.

        Returns:
            Bytes (uint8).
        """

    @abc.abstractmethod
    def unpack(self, body: np.ndarray, out: np.ndarray, combine: np.ufunc | None = None) -> None:
        """Reads bytes of `pack`.

        Args:
            body: uint8.
            out: receives the vector; of its size.
            combine: combines it with what lies there, ``np.add`` or ``np.subtract``; by default it is overwritten.
        """

    def payload_bytes(self, elements: int) -> float:
        """An estimate of the bytes of a payload, header included, for a float32 vector; by default uncompressed."""
        return payloads.HEADER_BYTES + 4 * elements

    def expected_ratio(self, elements: int) -> float:
        """How many times fewer bytes than float32 a payload takes, header included; an estimate."""
        return 4 * elements / self.payload_bytes(elements)

    def variance(self, elements: int) -> float:
        """A bound on E‖decoded − x‖² / ‖x‖² of an unbiased method; of others 0 where it is not known."""
        return 0.0

    def encode(self, vector: np.ndarray, state: State | None = None) -> np.ndarray:
        """Writes a vector down, with a header.

        A vector that holds NaN or infinity is not written: every element of what `decode` reads is NaN then, and
        the state stays as it was.

        Args:
            vector: floating-point, one-dimensional; float16 and bfloat16 are read as float32.
            state: of the tensor; by default as of the first step of a single process.

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
        """As `encode`, of zeros, in a state of their own."""
        return self.encode(np.zeros(elements, dtype), State(shape=state.shape))

    def granule(self, shape: tuple[int, ...] | None) -> int:
        """So many consecutive elements of a tensor belong together, and go to one rank on `Route.EXCHANGE`."""
        return 1

    def decode(self, payload: np.ndarray, out: np.ndarray | None = None, combine: np.ufunc | None = None) -> np.ndarray:
        """Reads a payload.

        Args:
            payload: what `encode` returned.
            out: receives the vector; of its size. A new array by default.
            combine: ``np.add`` or ``np.subtract``, to combine it with what lies in ``out``, instead of overwriting.

        Returns:
            The vector, one-dimensional.

        Raises:
            PayloadError: the payload is cut off or changed, or of another method, size or dtype.
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
            elements: of each vector.
            dtype: float32 or float64.
            state: of the sum.

        Returns:
            The payload of the sum.
        """
        total = np.zeros(elements, dtype)
        for place, payload in enumerate(encoded):
            self.decode(payload, total, np.add if place else None)
        return self.encode(saturate(total), state)

    def scalers(self, vector: np.ndarray, state: State) -> np.ndarray | None:
        """What ranks agree on before they encode, for `Route.GATHER`: the largest over all ranks, element by element.

        `pack` finds them as ``state.scalers``.

        Args:
            vector: as of `pack`.
            state: of the tensor.

        Returns:
            One-dimensional, finite, none negative, and of one length and dtype on all ranks; or None, for nothing.
        """
        return None

    def rounds(self, vector: np.ndarray, state: State) -> Generator[np.ndarray, np.ndarray, tuple[np.ndarray, ...]]:
        """Yields vectors to be summed over all ranks, and is sent the sums, for `Route.ALL_REDUCE`.

        Args:
            vector: as of `pack`.
            state: of the tensor, in the same step on all ranks.

        Returns:
            The bodies of two payloads: of the sum, and of what this rank has added to it.
        """
        raise TypeError(f"what {self!r} sends does not add up: its route is not {Route.ALL_REDUCE}")


def as_working(vector: np.ndarray) -> np.ndarray:
    """A vector as methods take it: contiguous, float32 or, if it was that, float64."""
    dtype = vector.dtype if vector.dtype in (np.float32, np.float64) else np.float32
    return np.ascontiguousarray(vector, dtype)


def is_finite(vector: np.ndarray) -> bool:
    """Whether there is no NaN and no infinity."""
    with np.errstate(all="ignore"):
        # A sum is quick, and NaN or infinity never leave it; it may only overflow by itself.
        return bool(np.isfinite(vector.sum())) or bool(np.isfinite(vector).all())


def saturate(vector: np.ndarray) -> np.ndarray:
    """Replaces what has overflowed, in place, by the largest number of its sign; NaN stays. Returns the vector."""
    limit = np.finfo(vector.dtype).max
    return vector if is_finite(vector) else np.clip(vector, -limit, limit, out=vector)


def segments(elements: int, length: int = 1 << 14) -> list[slice]:
    """Cuts so many elements into segments that stay in the cache while they are worked on."""
    return [slice(start, min(start + length, elements)) for start in range(0, elements, length)]


def store(out: np.ndarray, values: np.ndarray, combine: np.ufunc | None) -> None:
    """Combines values with what lies in ``out``; overwrites it by default."""
    if combine is None:
        out[...] = values
    else:
        combine(out, values, out=out)
