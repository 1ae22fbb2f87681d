"""The format of payloads, which are sent in place of gradients: a small versioned header, and the method's body.

| bytes | field |
|---|---|
| 0–1 | the letters ``tg`` |
| 2 | version of the format, 1 |
| 3 | number of the method |
| 4 | size of an element of the vector in bytes: 4 (float32) or 8 (float64) |
| 5 | 1 if the vector was not finite and there is no body; else 0 |
| 6–7 | zero |
| 8–15 | number of elements of the vector |
| 16–19 | size of the body in bytes |
| 20–23 | CRC-32 of the preceding header bytes and the body |
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
    """The contents of a payload.

    Attributes:
        method: the number of the method that made the body.
        dtype: the vector's dtype: float32 or float64.
        elements: the number of elements of the vector.
        body: bytes; None if the vector held NaN or infinity.
    """

    method: int
    dtype: np.dtype
    elements: int
    body: np.ndarray | None


def write(payload: Payload) -> np.ndarray:
    """Returns the payload as bytes (uint8)."""
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
    """Reads and checks the bytes of `write`.

    Args:
        written: bytes of a payload (uint8).
        method: the number of the expected method.
        elements: the expected number of elements; any by default.

    Raises:
        PayloadError: the payload is truncated or corrupted, or of another method, version or size.
    """
    if len(written) < HEADER_BYTES:
        raise PayloadError(f"a payload has at least {HEADER_BYTES} bytes; got {len(written)}")
    header = written[: _HEADER.size].tobytes()
    magic, version, number, itemsize, flags, _, count, length = _HEADER.unpack(header)
    if magic != _MAGIC or version != _VERSION:
        raise PayloadError(
            f"a payload begins with {_MAGIC!r} and version {_VERSION}; got {magic!r} and {version}: the bytes were "
            "corrupted in transit, or made by another version of tfdist. Install the same version on every rank."
        )
    body = written[HEADER_BYTES:]
    if len(body) != length:
        raise PayloadError(f"the payload's body should have {length} bytes; got {len(body)}: it was cut off")
    (checksum,) = _CHECKSUM.unpack(written[_HEADER.size : HEADER_BYTES].tobytes())
    if _checksum(header, body) != checksum:
        raise PayloadError("the payload's checksum is wrong: its bytes were corrupted in transit")
    if number != method:
        raise PayloadError(f"the payload was made by method number {number}; expected {method}, as on this rank")
    if elements is not None and count != elements:
        raise PayloadError(f"the payload holds a vector of {count} elements; expected {elements}, as on this rank")
    return Payload(number, np.dtype(f"f{itemsize}"), count, None if flags else body)


def without_filling(written: np.ndarray) -> np.ndarray:
    """Removes the padding of a payload that was padded to an agreed length."""
    if len(written) < HEADER_BYTES:
        return written
    length = _HEADER.unpack(written[: _HEADER.size].tobytes())[-1]
    return written[: HEADER_BYTES + length]


def _checksum(header: bytes, body: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(body).data, zlib.crc32(header))
