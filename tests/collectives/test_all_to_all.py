import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.all_to_all import all_to_all


def parts(size, dtype=np.float32):
    """What each rank sends, of lengths that depend on both ranks, and the arrays that it receives into."""
    given = [
        [np.arange(source * target % 5).astype(dtype) + 10 * source + target for target in range(size)]
        for source in range(size)
    ]
    taken = [[np.zeros(source * rank % 5, dtype) for source in range(size)] for rank in range(size)]
    return given, taken


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [np.int8, np.float16, np.complex128])
def test_blocks_of_unequal_lengths_reach_their_ranks(size, dtype):
    given, taken = parts(size, dtype)
    simulate(size, lambda rank: all_to_all(given[rank], taken[rank]))
    for rank in range(size):
        for source in range(size):
            np.testing.assert_array_equal(taken[rank][source], given[source][rank])


def test_given_is_only_read():
    given, taken = parts(5)
    for blocks in given:
        for block in blocks:
            block.flags.writeable = False
    simulate(5, lambda rank: all_to_all(given[rank], taken[rank]))


def test_empty_blocks_are_not_sent():
    given, taken = parts(5)
    _, communicators = simulate(5, lambda rank: all_to_all(given[rank], taken[rank]))
    for rank, communicator in enumerate(communicators):
        others = [block for target, block in enumerate(given[rank]) if target != rank]
        assert communicator.messages_sent == sum(block.size > 0 for block in others)
        assert communicator.bytes_sent == sum(block.nbytes for block in others)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_each_rank_receives_from_one_rank_per_step(size):
    destinations = [[] for _ in range(size)]

    def recorded(rank):
        plan = all_to_all([np.ones(3)] * size, [np.empty(3) for _ in range(size)])

        def schedule(comm, tag):
            send = comm.send

            def record(buffer, destination, tag):
                destinations[rank].append(destination)
                return send(buffer, destination, tag)

            comm.send = record
            return plan(comm, tag)

        return schedule

    simulate(size, recorded)
    for step in range(size - 1):
        assert sorted(sent[step] for sent in destinations) == list(range(size))


def test_long_blocks_are_sent_in_segments():
    given = [[np.arange(100.0) + 1000 * source + 100 * target for target in range(3)] for source in range(3)]
    taken = [[np.zeros(100) for _ in range(3)] for _ in range(3)]
    _, communicators = simulate(3, lambda rank: all_to_all(given[rank], taken[rank]), segment_bytes=160)
    np.testing.assert_array_equal(taken, np.swapaxes(given, 0, 1))
    assert [communicator.messages_sent for communicator in communicators] == [2 * 5] * 3
