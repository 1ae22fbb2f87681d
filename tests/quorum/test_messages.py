import numpy as np
import pytest

from tfdist.parameter_server.protocol.wire import InvalidMessageError
from tfdist.quorum.messages import CODEC, ArrayPiece, FetchedState, FetchState


@pytest.mark.parametrize(
    ("message", "arrays"),
    [
        (FetchState(3, "optimizer 0"), []),
        (FetchedState(3, 7, 5, 100, (1, 1, 0)), [np.arange(3.0), np.ones((2, 2), np.float32)]),
        (ArrayPiece("optimizer 0", 2, 1, "own 0", 4), [np.arange(5, dtype=np.uint8)]),
    ],
)
def test_decoded_messages_equal_encoded_ones(message, arrays):
    decoded_message, decoded = CODEC.decode([bytes(frame) for frame in CODEC.encode(message, arrays)])
    assert decoded_message == message
    for array, other in zip(decoded, arrays, strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(array, other)


def test_invalid_message_raises():
    with pytest.raises(InvalidMessageError):
        CODEC.decode([b"tfps\x04nothing"])
