import ml_dtypes
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.point_to_point import DESTINATION, SOURCE, receive, send


def transferred(array, take=None, **world):
    """The received array, and the source's communicator."""
    take = take or (lambda nbytes: np.empty(nbytes, np.uint8))

    def plan(rank):
        return {SOURCE: send(array), DESTINATION: receive(array.ndim, array.dtype, take)}[rank]

    results, communicators = simulate(2, plan, **world)
    assert results[SOURCE] is None
    assert communicators[DESTINATION].messages_sent == 0
    return results[DESTINATION], communicators[SOURCE]


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5,), (2, 3), (0, 3), (3, 0), (2, 1, 4, 1)])
@pytest.mark.parametrize("dtype", ["bool", "int64", "float16", "complex64", ml_dtypes.bfloat16])
def test_received_array_equals_the_sent_one(shape, dtype):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    received, _ = transferred(array)
    assert (received.shape, received.dtype) == (array.shape, array.dtype)
    np.testing.assert_array_equal(received, array)


def test_array_lies_in_the_memory_that_is_taken():
    memory = []

    def take(nbytes):
        memory.append(np.full(nbytes, 255, np.uint8))
        return memory[-1]

    received, _ = transferred(np.ones((3, 4), np.float32), take)
    assert [buffer.nbytes for buffer in memory] == [48]
    assert np.shares_memory(received, memory[0])


def test_shape_and_elements_are_sent_as_two_messages():
    """The shape, then the elements; an empty array takes no message for them."""
    for array, messages in ((np.ones((3, 4)), 2), (np.ones(()), 1), (np.ones((0, 4)), 1)):
        _, source = transferred(array)
        assert source.messages_sent == messages
        assert source.bytes_sent == 8 * array.ndim + array.nbytes


def test_long_array_is_sent_in_segments():
    array = np.arange(1001, dtype=np.float64).reshape(7, 143)
    received, source = transferred(array, segment_bytes=1000)
    np.testing.assert_array_equal(received, array)
    assert source.messages_sent == 1 + 9


def test_array_is_only_read():
    array = np.arange(6.0).reshape(2, 3)
    array.flags.writeable = False
    received, _ = transferred(array)
    np.testing.assert_array_equal(received, array)


def test_several_at_once_arrive_in_order():
    """With one tag, as of many calls of one key."""
    arrays = [np.full((number,), float(number)) for number in range(4)]

    def plan(rank):
        def schedule(comm, tag):
            returned = []
            for array in arrays:
                transfer = send(array) if rank == SOURCE else receive(1, array.dtype, lambda n: np.empty(n, np.uint8))
                returned.append((yield from transfer(comm, tag)))
            return returned

        return schedule

    results, _ = simulate(2, plan)
    for received, array in zip(results[DESTINATION], arrays, strict=True):
        np.testing.assert_array_equal(received, array)
