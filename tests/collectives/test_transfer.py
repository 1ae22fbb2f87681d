import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.transfer import IN_FLIGHT, exchange
from tfdist.comm.local import LocalWorld


def between_two(steps, **world):
    """Each of two ranks makes one exchange with the other."""
    return simulate(2, lambda rank: lambda comm, tag: exchange(comm, tag, **steps[rank]), **world)[1]


@pytest.mark.parametrize("lengths", [(10, 10), (100, 3), (0, 7), (7, 0), (0, 0), (64, 65)])
@pytest.mark.parametrize("segment_bytes", [1, 8, 80, 1 << 20])
def test_ranks_exchange_vectors_in_both_directions_at_once(lengths, segment_bytes):
    given = [np.arange(float(length)) + 1000 * rank for rank, length in enumerate(lengths)]
    taken = [np.full(length, np.nan) for length in lengths[::-1]]
    steps = [
        {"outgoing": given[rank], "destination": 1 - rank, "target": taken[rank], "source": 1 - rank}
        for rank in range(2)
    ]
    communicators = between_two(steps, segment_bytes=segment_bytes)
    for rank in range(2):
        np.testing.assert_array_equal(taken[rank], given[1 - rank])
        assert communicators[rank].messages_sent == -(-lengths[rank] // max(1, segment_bytes // 8))
        assert communicators[rank].bytes_sent == given[rank].nbytes


@pytest.mark.parametrize("in_place", [True, False])
def test_received_segments_are_combined_with_own(in_place):
    own = np.arange(20, dtype=np.int32)
    target = own if in_place else np.zeros(20, np.int32)
    steps = [
        {"outgoing": np.full(20, 3, np.int32), "destination": 1},
        {"target": target, "source": 0, "own": own, "combine": np.multiply},
    ]
    between_two(steps, segment_bytes=16)
    np.testing.assert_array_equal(target, 3 * np.arange(20))
    if not in_place:
        np.testing.assert_array_equal(own, np.arange(20))


def test_in_flight_segments_are_limited():
    """The next segment is in flight while one is used, but not all of a large vector."""
    world = LocalWorld(2, segment_bytes=10)
    source, target = world.communicator(0), world.communicator(1)
    data, landing = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    sending = exchange(source, 0, outgoing=data, destination=1)
    next(sending)
    assert source.messages_sent == IN_FLIGHT
    receiving = exchange(target, 0, target=landing, source=0)
    requests = next(receiving)
    assert target.completed(requests)
    assert landing[:20].tolist() == list(range(20)), "what is under way has arrived"
    assert not landing[20:].any()
    next(sending)
    assert source.messages_sent == IN_FLIGHT + 1


def test_each_segment_is_yielded_once_and_in_order():
    world = LocalWorld(2, segment_bytes=10)
    sending = exchange(world.communicator(0), 0, outgoing=np.zeros(35, np.uint8), destination=1)
    sizes = [sum(request.buffer.size for request in requests) for requests in sending]
    assert sizes == [10, 10, 10, 5]


def test_exchange_without_buffers_yields_nothing():
    world = LocalWorld(1)
    assert list(exchange(world.communicator(0), 0)) == []
