"""The messages between workers and parameter servers: a typed header, and arrays in the bytes of their memory.

A message is several ZeroMQ frames: the header, and one for each array, unless all arrays are small enough to be in the
header. The header begins with `MAGIC` and `VERSION`; its rest is MessagePack: the message, and the dtype and shape of
each array. A message that does not decode, or whose frames do not have the announced lengths, is refused. Nothing is
ever unpickled.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import ml_dtypes  # noqa: F401  (registers its dtypes' names with NumPy)
import msgspec
import numpy as np

MAGIC = b"tfps"
VERSION = 7
"""Version of the messages, raised whenever they change, so that different versions stop with a clear error."""

MAX_HEADER = 1 << 20
"""Maximum bytes of a header."""

MAX_INLINE = 1 << 12
"""Maximum bytes of all arrays of a message together that are sent within the header: each frame takes some time."""

MAX_DIMENSIONS = 32
"""Maximum number of dimensions of an array, which all versions of NumPy support."""

MAX_ELEMENTS = 1 << 48
"""Maximum number of elements of an array, where dimensions of 0 count as 1; NumPy counts elements in 63 bits."""

DTYPES = {
    name: np.dtype(name)
    for name in (
        "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
        "float8_e4m3fn float8_e5m2"
    ).split()
}
"""Dtypes that arrays may have, by name. Objects, strings and structures are not among them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""NumPy makes the name of a dtype anew each time, which takes a tenth of the time of a small message."""


class InvalidMessageError(ValueError):
    """The received frames are not a message of this version."""


class Array(msgspec.Struct, frozen=True, array_like=True):
    """The dtype and shape of an array, and its bytes; without bytes, they follow in a frame."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Number of bytes of the array's elements."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class Message(msgspec.Struct, frozen=True, tag=str.lower):
    """Base of all messages."""


class WorkerMessage(Message, frozen=True):
    """Base of the messages of a worker.

    Attributes:
        worker: number of the worker's task.
        incarnation: random number of this session, so that a worker that comes again is not taken for the first.
    """

    id: int
    worker: int
    incarnation: int


class Codec:
    """Encodes and decodes the messages of one direction.

    Args:
        kinds: union of the subclasses of `Message` to decode.
    """

    def __init__(self, kinds: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(tuple[kinds, tuple[Array, ...]])

    @staticmethod
    def encode(message: Message, arrays: Sequence[np.ndarray] = ()) -> list[Any]:
        """Returns the frames of a message. Contiguous arrays become views, which must not change until they are sent.

        Arrays with at most `MAX_INLINE` bytes together are copied into the header.

        Args:
            message: message for the header.
            arrays: arrays, in the order in which they are decoded.

        Raises:
            TypeError: the dtype of an array is not in `DTYPES`.
        """
        described = []
        frames = []
        is_inline = sum(array.nbytes for array in arrays) <= MAX_INLINE
        for array in arrays:
            if (name := _NAMES.get(array.dtype)) is None:
                raise TypeError(f"arrays of dtype {array.dtype} are not sent to parameter servers")
            described.append(Array(name, array.shape, array.tobytes() if is_inline else None))
            if not is_inline:
                frames.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return [MAGIC + bytes([VERSION]) + msgspec.msgpack.encode((message, described)), *frames]

    def decode(self, frames: Sequence[Any]) -> tuple[Any, list[np.ndarray]]:
        """Returns a message and its arrays, which are read-only views of the frames, or of bytes of the header.

        Args:
            frames: frames as they were received: bytes, or objects with a buffer.

        Raises:
            InvalidMessageError: the frames are not a valid message.
        """
        if not frames:
            raise InvalidMessageError("no frames")
        header = bytes(frames[0][: MAX_HEADER + 1])
        if len(header) > MAX_HEADER:
            raise InvalidMessageError(f"a header of more than {MAX_HEADER} bytes")
        if header[: len(MAGIC)] != MAGIC:
            raise InvalidMessageError("not a message of tfdist's parameter servers")
        if (version := header[len(MAGIC) : len(MAGIC) + 1]) != bytes([VERSION]):
            raise InvalidMessageError(f"version {list(version)} of the messages; expected [{VERSION}]")
        try:
            message, described = self._decoder.decode(header[len(MAGIC) + 1 :])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidMessageError(f"the header cannot be decoded: {error}") from None
        announced = sum(spec.content is None for spec in described)
        if announced != len(frames) - 1:
            raise InvalidMessageError(f"{len(frames) - 1} arrays; the header announces {announced}")
        rest = iter(frames[1:])
        return message, [_array(spec, next(rest) if spec.content is None else spec.content) for spec in described]


def _array(spec: Array, content: Any) -> np.ndarray:
    if spec.dtype not in DTYPES:
        raise InvalidMessageError(f"an array of dtype {spec.dtype[:40]!r}")
    if len(spec.shape) > MAX_DIMENSIONS:
        raise InvalidMessageError(f"an array of {len(spec.shape)} dimensions")
    elements = prod(spec.shape) or prod(max(size, 1) for size in spec.shape)
    if min(spec.shape, default=0) < 0 or elements > MAX_ELEMENTS:
        raise InvalidMessageError(f"an array of shape {spec.shape}")
    view = memoryview(content)
    if view.nbytes != spec.nbytes:
        raise InvalidMessageError(f"{view.nbytes} bytes for {spec.dtype} {spec.shape}, which has {spec.nbytes}")
    return np.frombuffer(view, DTYPES[spec.dtype]).reshape(spec.shape)
