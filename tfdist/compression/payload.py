"""What travels in place of a gradient: a small versioned header, and a body that its method understands.

| bytes | field |
|---|---|
| 0–1 | the letters ``tg`` |
| 2 | version of the format, 1 |
| 3 | number of the method |
| 4 | bytes of an element of the vector: 4 (float32) or 8 (float64) |
| 5 | 1 where the vector was not finite and there is no body; else 0 |
| 6–7 | zero |
| 8–15 | elements of the vector |
| 16–19 | bytes of the body |
| 20–23 | CRC-32 of the header before it and of the body |
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from tfdist.errors import PayloadError

_HEADER = struct.Struct("<2sBBBBHQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size

_MAGIC = b"tg"
_VERSION = 1


@dataclass(frozen=True)
class Payload:
    """A payload that has been read and found whole.

    Attributes:
        method: number of the method that made the body.
        dtype: of the vector: float32 or float64.
        elements: of the vector.
        body: bytes; None where the vector held NaN or infinity.
    """

    method: int
    dtype: np.dtype
    elements: int
    body: np.ndarray | None


def write(payload: Payload) -> np.ndarray:
    """The payload as bytes (uint8)."""
    body = np.empty(0, np.uint8) if payload.body is None else payload.body
    flags = int(payload.body is None)
    header = _HEADER.pack(
        _MAGIC, _VERSION, payload.method, payload.dtype.itemsize, flags, 0, payload.elements, len(body)
    )
    written = np.empty(HEADER_BYTES + len(body), np.uint8)
    checksum = _CHECKSUM.pack(_checksum(header, body))
    written[:HEADER_BYTES] = np.frombuffer(header + checksum, np.uint8)
    written[HEADER_BYTES:] = body
    return written


def read(written: np.ndarray, method: int, elements: int | None = None) -> Payload:
    """Reads bytes that `write` made.

    Args:
        written: uint8.
        method: the number of the method that should have made the body.
        elements: that the vector should have; any number by default.

    Raises:
        PayloadError: they are cut off or changed, or of another method, version or vector.
    """
    if len(written) < HEADER_BYTES:
        raise PayloadError(f"a payload has at least {HEADER_BYTES} bytes; got {len(written)}")
    header = written[: _HEADER.size].tobytes()
    magic, version, number, itemsize, flags, _, count, length = _HEADER.unpack(header)
    if magic != _MAGIC or version != _VERSION:
        raise PayloadError(
            f"a payload begins with {_MAGIC!r} and version {_VERSION}; got {magic!r} and {version}: the bytes were "
            "changed on the way, or another version of tfdist made them"
        )
    body = written[HEADER_BYTES:]
    if len(body) != length:
        raise PayloadError(f"the payload's body should have {length} bytes; got {len(body)}: it was cut off")
    (checksum,) = _CHECKSUM.unpack(written[_HEADER.size : HEADER_BYTES].tobytes())
    if _checksum(header, body) != checksum:
        raise PayloadError("the payload's checksum is wrong: its bytes were changed on the way")
    if number != method:
        raise PayloadError(f"the payload was made by method number {number}; expected {method}, as on this rank")
    if elements is not None and count != elements:
        raise PayloadError(f"the payload holds a vector of {count} elements; expected {elements}, as on this rank")
    return Payload(number, np.dtype(f"f{itemsize}"), count, None if flags else body)


def without_filling(written: np.ndarray) -> np.ndarray:
    """The bytes of a payload that may have been filled up to a length agreed on."""
    if len(written) < HEADER_BYTES:
        return written
    length = _HEADER.unpack(written[: _HEADER.size].tobytes())[-1]
    return written[: HEADER_BYTES + length]


def _checksum(header: bytes, body: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(body).data, zlib.crc32(header))
