import struct
import zlib

import numpy as np
import pytest

from tfdist.compression import payload
from tfdist.compression.payload import HEADER_BYTES, Payload
from tfdist.errors import PayloadError

BODY = np.arange(7, dtype=np.uint8)


def written(method=3, dtype="float32", elements=100, body=BODY):
    return payload.write(Payload(method, np.dtype(dtype), elements, body))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("body", [BODY, np.empty(0, np.uint8)])
def test_written_payload_is_read_back(dtype, body):
    parsed = payload.read(written(200, dtype, 1 << 40, body), 200, 1 << 40)
    assert (parsed.method, parsed.dtype, parsed.elements) == (200, np.dtype(dtype), 1 << 40)
    np.testing.assert_array_equal(parsed.body, body)


def test_missing_and_empty_bodies_are_distinguished():
    parsed = payload.read(written(body=None), 3)
    assert parsed.body is None
    assert payload.read(written(body=np.empty(0, np.uint8)), 3).body is not None, "an empty vector's is empty"


def test_bytes_equal_the_documented_layout():
    """The table of the format, byte by byte: other versions read it."""
    data = written(17, "float64", 300).tobytes()
    assert len(data) == HEADER_BYTES + 7 == 24 + 7
    head = b"tg" + bytes([1, 17, 8, 0, 0, 0]) + struct.pack("<Q", 300) + struct.pack("<I", 7)
    assert data[:20] == head
    assert data[20:24] == struct.pack("<I", zlib.crc32(head + BODY.tobytes()))
    assert data[24:] == BODY.tobytes()
    assert written(body=None).tobytes()[5] == 1


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1])
def test_payload_shorter_than_a_header_raises(length):
    with pytest.raises(PayloadError, match=f"at least 24 bytes; got {length}"):
        payload.read(written()[:length], 3)


def test_truncated_body_raises():
    with pytest.raises(PayloadError, match="should have 7 bytes; got 6: it was cut off"):
        payload.read(written()[:-1], 3)


def test_every_changed_bit_is_noticed():
    data = written()
    for place in range(data.size):
        for bit in range(8):
            changed = data.copy()
            changed[place] ^= 1 << bit
            with pytest.raises(PayloadError):
                payload.read(changed, 3)


def test_another_version_raises():
    data = written()
    data[2] = 2
    with pytest.raises(PayloadError, match=r"version 1; got b'tg' and 2: .* another version of tfdist"):
        payload.read(data, 3)


def test_payload_of_another_method_or_length_raises():
    with pytest.raises(PayloadError, match="made by method number 3; expected 4"):
        payload.read(written(), 4)
    with pytest.raises(PayloadError, match="a vector of 100 elements; expected 99"):
        payload.read(written(), 3, 99)


def test_padding_is_removed():
    for body in (BODY, None):
        filled = np.append(written(body=body), np.full(9, 255, np.uint8))
        with pytest.raises(PayloadError):
            payload.read(filled, 3)
        np.testing.assert_array_equal(payload.without_filling(filled), written(body=body))
        np.testing.assert_array_equal(payload.without_filling(written(body=body)), written(body=body))
    assert payload.without_filling(filled[:5]).size == 5, "whoever reads it says what is wrong"


def test_non_contiguous_payload_is_read():
    spread = np.empty(2 * written().size, np.uint8)
    spread[::2] = written()
    np.testing.assert_array_equal(payload.read(spread[::2], 3).body, BODY)
