import random

import ml_dtypes
import msgspec
import numpy as np
import pytest

from tfdist.parameter_server.protocol import wire
from tfdist.parameter_server.protocol.wire import Array, Codec, InvalidMessageError, Message


class Push(Message, frozen=True):
    worker: int
    clock: int


class Pull(Message, frozen=True):
    worker: int


CODEC = Codec(Push | Pull)


def sent(message, *arrays):
    """The frames as they come: bytes."""
    return [bytes(frame) for frame in CODEC.encode(message, arrays)]


@pytest.mark.parametrize("dtype", [*sorted(wire.DTYPES.keys() - {"bool"}), "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_arrive_as_they_were(dtype, shape):
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape)).astype(dtype)
    message, (arrived,) = CODEC.decode(sent(Push(1, 2), array))
    assert message == Push(1, 2)
    assert arrived.dtype == array.dtype
    assert arrived.shape == shape
    assert arrived.tobytes() == array.tobytes()
    assert not arrived.flags.writeable or not arrived.size


def test_several_arrays_and_none():
    arrays = [np.ones(3, np.float32), np.float64(2), np.arange(6).reshape(2, 3).T]
    message, arrived = CODEC.decode(sent(Pull(7), *map(np.asarray, arrays)))
    assert message == Pull(7)
    for array, other in zip(arrays, arrived, strict=True):
        np.testing.assert_array_equal(array, other)
    assert CODEC.decode(sent(Pull(7))) == (Pull(7), [])


def test_contiguous_arrays_are_not_copied():
    array = np.zeros(wire.MAX_INLINE, np.float32)
    _, frame = CODEC.encode(Pull(0), [array])
    array[0] = 5
    assert np.frombuffer(frame, np.float32)[0] == 5


@pytest.mark.parametrize(("elements", "frames"), [(0, 1), (wire.MAX_INLINE // 8, 1), (wire.MAX_INLINE // 8 + 1, 3)])
def test_few_bytes_are_in_the_header(elements, frames):
    arrays = [np.arange(elements, dtype=np.float32), np.full(elements, -7, np.int32)]
    encoded = CODEC.encode(Push(1, 2), arrays)
    assert len(encoded) == frames
    arrays[0][:] = 0  # nothing that is sent depends on it where it was copied
    message, arrived = CODEC.decode([bytes(frame) for frame in encoded])
    assert message == Push(1, 2)
    np.testing.assert_array_equal(arrived[0], np.arange(elements) if frames == 1 else np.zeros(elements))
    np.testing.assert_array_equal(arrived[1], arrays[1])


@pytest.mark.parametrize("array", [np.array(["a"]), np.array([None]), np.zeros(2, "i4,f4"), np.zeros(1, "M8[s]")])
def test_arrays_of_other_dtypes_raise(array):
    with pytest.raises(TypeError, match="are not sent to parameter servers"):
        CODEC.encode(Pull(0), [array])


def header(content, magic=wire.MAGIC, version=wire.VERSION):
    return magic + bytes([version]) + msgspec.msgpack.encode(content)


def announces(dtype, *shape, content=None):
    return header((Pull(0), [Array(dtype, shape, content)]))


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([], "no frames"),
        ([b""], "not a message of tfdist"),
        ([b"GET / HTTP/1.1\r\n"], "not a message of tfdist"),
        ([header((Pull(0), []), version=1)], r"version \[1\] of the messages; expected \[7\]"),
        ([wire.MAGIC], r"version \[\] of the messages"),
        ([header((Pull(0), []))[:-1]], "the header cannot be decoded"),
        ([header((Pull(0), [])) + b"x"], "the header cannot be decoded"),
        ([header(({"type": "other"}, []))], "the header cannot be decoded"),
        ([header(({"type": "pull", "worker": "1"}, []))], "the header cannot be decoded"),
        ([b"tfps\x07" + b"\x91" * 100_000], "the header cannot be decoded"),
        ([header((Pull(0), [])), b"x"], "1 arrays; the header announces 0"),
        ([announces("float32", 3)], "0 arrays; the header announces 1"),
        ([announces("float32", 3), b"x" * 11], r"11 bytes for float32 \(3,\), which has 12"),
        ([announces("float32", 3, content=b"x" * 11)], r"11 bytes for float32 \(3,\), which has 12"),
        ([announces("float32", 3, content=b"x" * 12), b"x" * 12], "1 arrays; the header announces 0"),
        ([announces("float32", 3, content="x" * 12)], "the header cannot be decoded"),
        ([announces("float32", 1 << 62, 1 << 62), b""], "an array of shape"),
        ([announces("float32", 0, 1 << 62, 1 << 62), b""], "an array of shape"),
        ([announces("float32", *[1] * 65), b"x" * 4], "an array of 65 dimensions"),
        ([announces("float32", -1, -3), b"x" * 12], "an array of shape"),
        ([announces("object", 1), b"x" * 8], "an array of dtype 'object'"),
        ([announces("O" * 10_000, 1), b"x"], "an array of dtype 'OOO"),
        ([b"tfps\x07" + b"\xc4" * (1 << 21)], "a header of more than"),
    ],
)
def test_invalid_messages_are_refused(frames, words):
    with pytest.raises(InvalidMessageError, match=words):
        CODEC.decode(frames)


@pytest.mark.parametrize("elements", [5, wire.MAX_INLINE])
def test_random_bytes_raise_only_invalid_message_error(elements):
    """Random bytes of any kind raise no other error."""
    generator = random.Random(0)
    good = sent(Push(1, 2), np.arange(elements, dtype=np.float32))
    for _ in range(3000):
        frames = [bytearray(frame) for frame in good]
        for _ in range(generator.randint(1, 4)):
            frame = generator.choice(frames)
            if generator.random() < 0.3:
                del frame[generator.randrange(len(frame) + 1) :]
            elif frame:
                frame[generator.randrange(len(frame))] = generator.randrange(256)
        try:
            message, arrays = CODEC.decode([bytes(frame) for frame in frames])
        except InvalidMessageError:
            continue
        assert isinstance(message, Push | Pull)
        assert all(array.dtype.name in wire.DTYPES for array in arrays)


def test_bfloat16_arrays_survive_encoding():
    array = np.ones(2, ml_dtypes.bfloat16)
    assert CODEC.decode(sent(Pull(0), array))[1][0].dtype == ml_dtypes.bfloat16
