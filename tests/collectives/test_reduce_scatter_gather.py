import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import reduce_scatter_gather


def sent(size, length):
    """By rank: to whom each message went, and how many elements it had."""
    messages = [[] for _ in range(size)]
    buffers = [np.full(length, 1.0) for _ in range(size)]

    def recorded(rank):
        plan = reduce_scatter_gather.all_reduce(buffers[rank])

        def schedule(comm, tag):
            send = comm.send

            def record(buffer, destination, tag):
                messages[rank].append((destination, buffer.size))
                return send(buffer, destination, tag)

            comm.send = record
            return plan(comm, tag)

        return schedule

    simulate(size, recorded)
    np.testing.assert_array_equal(buffers, size)
    return messages


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_the_vector_is_halved_and_doubled(size):
    """The farthest partner gets half of the vector; then the same partners in reverse order, with as much again."""
    distances = [size >> step for step in range(1, size.bit_length())]
    halving = [(distance, 64 * distance) for distance in distances]
    for rank, messages in enumerate(sent(size, 64 * size)):
        assert messages == [(rank ^ distance, length) for distance, length in halving + halving[::-1]]


@pytest.mark.parametrize("size", [3, 6, 7])
def test_extra_ranks_fold_onto_their_pairs(size):
    power = 1 << (size.bit_length() - 1)
    messages = sent(size, 60)
    for rank in range(0, 2 * (size - power), 2):
        assert messages[rank] == [(rank + 1, 60)]
        assert messages[rank + 1][-1] == (rank, 60)


@pytest.mark.parametrize("size", [2, 3, 4, 8, 11])
def test_fewer_elements_than_ranks(size):
    for length in range(size + 2):
        messages = [message for ranks in sent(size, length) for message in ranks]
        assert all(elements > 0 for _, elements in messages)


def test_each_part_is_combined_by_one_rank():
    """So that the result is the same on all ranks even if the order of the operands matters."""
    buffers = [np.full(8, float(rank)) for rank in range(4)]

    def first(own, other, out):
        np.copyto(out, own)

    simulate(4, lambda rank: reduce_scatter_gather.all_reduce(buffers[rank], first))
    np.testing.assert_array_equal(buffers, [np.repeat([0.0, 1.0, 2.0, 3.0], 2)] * 4)
