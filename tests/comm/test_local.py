import threading

import numpy as np
import pytest

from tfdist.comm.local import LocalWorld


@pytest.fixture
def pair():
    world = LocalWorld(2)
    return world.communicator(0), world.communicator(1)


def test_world_passes_hosts_and_segment_size_to_communicators():
    communicator = LocalWorld(3, hosts=[0, 0, 1], segment_bytes=64).communicator(2)
    assert (communicator.rank, communicator.size, communicator.hosts) == (2, 3, (0, 0, 1))
    assert communicator.segment_bytes == 64
    assert LocalWorld(3).communicator(0).hosts == (0, 0, 0)


@pytest.mark.parametrize("sent_first", [True, False])
def test_a_transfer_completes_when_both_sides_have_begun(pair, sent_first):
    source, target = pair
    buffer, given = np.zeros(3), np.arange(3.0)
    begin = [
        (source, lambda: source.send(given, 1, 0)),
        (target, lambda: target.receive(buffer, 0, 0)),
    ]
    (first, start), (second, meet) = begin if sent_first else begin[::-1]
    early = start()
    assert not first.completed([early])
    late = meet()
    assert first.completed([early])
    assert second.completed([late])
    assert buffer.tolist() == [0, 1, 2]


def test_one_tag_keeps_the_order(pair):
    source, target = pair
    buffers = [np.zeros(1) for _ in range(4)]
    requests = [target.receive(buffer, 0, 7) for buffer in buffers[:2]]
    for value in range(4):
        source.send(np.array([float(value)]), 1, 7)
    requests += [target.receive(buffer, 0, 7) for buffer in buffers[2:]]
    assert target.completed(requests)
    assert np.concatenate(buffers).tolist() == [0, 1, 2, 3]


def test_tags_and_ranks_are_told_apart():
    world = LocalWorld(3)
    zero, one, two = (world.communicator(rank) for rank in range(3))
    buffers = {(source, tag): np.zeros(1) for source in (0, 2) for tag in (0, 1)}
    requests = {key: one.receive(buffer, *key) for key, buffer in buffers.items()}
    two.send(np.array([21.0]), 1, 1)
    zero.send(np.array([1.0]), 2, 0)  # for somebody else
    assert [key for key, request in requests.items() if one.completed([request])] == [(2, 1)]
    assert not one.completed(list(requests.values()))
    zero.send(np.array([1.0]), 1, 1)
    zero.send(np.array([0.5]), 1, 0)
    two.send(np.array([20.0]), 1, 0)
    assert one.completed(list(requests.values()))
    assert {key: buffer[0] for key, buffer in buffers.items()} == {(0, 0): 0.5, (0, 1): 1, (2, 0): 20, (2, 1): 21}


def test_received_buffer_is_the_second_operand(pair):
    source, target = pair
    operand, result = np.array([10.0, 20.0]), np.zeros(2)
    request = target.receive_combined(operand, result, np.subtract, 0, 0)
    source.send(np.array([1.0, 2.0]), 1, 0)
    assert target.completed([request])
    assert result.tolist() == [9, 18]
    assert operand.tolist() == [10, 20]


def test_a_message_of_another_length_is_an_error(pair):
    source, target = pair
    target.receive(np.zeros(3), 0, 0)
    with pytest.raises(ValueError, match="could not broadcast"):
        source.send(np.ones(4), 1, 0)


def test_sender_counts_messages_and_bytes(pair):
    source, target = pair
    target.receive(np.zeros(3), 0, 0)
    source.send(np.ones(3), 1, 0)
    source.send(np.ones(5, np.int8), 1, 0)
    assert (source.messages_sent, source.bytes_sent) == (2, 29)
    assert (target.messages_sent, target.bytes_sent) == (0, 0)


def test_taken_memory_is_bytes_of_requested_size(pair):
    memory = pair[0].take(24)
    assert (memory.dtype, memory.nbytes) == (np.uint8, 24)
    assert memory.view(np.float64).shape == (3,)


def test_concurrent_ranks_on_threads_exchange_all_messages():
    """Every rank on a thread of its own, all of them sending to all at once."""
    size, messages = 4, 200
    world, gate = LocalWorld(size), threading.Barrier(size)
    received = {}

    def work(rank):
        communicator = world.communicator(rank)
        buffers = np.full((size, messages), -1.0)
        gate.wait(100)
        requests = []
        for number in range(messages):
            for other in range(size):
                requests.append(communicator.send(np.array([100.0 * rank + number]), other, other))
                requests.append(communicator.receive(buffers[other, number : number + 1], other, rank))
        gate.wait(100)  # all have begun all of theirs
        if communicator.completed(requests):
            received[rank] = buffers

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    expected = 100.0 * np.arange(size)[:, np.newaxis] + np.arange(messages)
    for rank in range(size):
        np.testing.assert_array_equal(received[rank], expected)
