import functools

import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import naive

rng = np.random.default_rng(0)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_every_rank_adds_in_the_order_of_the_ranks(size, dtype):
    """Bitwise: any other order rounds differently."""
    buffers = [rng.standard_normal(3000).astype(dtype) for _ in range(size)]
    expected = functools.reduce(np.add, [buffer.copy() for buffer in buffers])
    simulate(size, lambda rank: naive.all_reduce(buffers[rank]))
    for buffer in buffers:
        assert buffer.tobytes() == expected.tobytes()


def test_vectors_lie_in_the_communicators_memory():
    """Pool memory is fast to send from; the buffer itself may be any memory."""
    taken = []

    def plan(rank):
        def schedule(comm, tag):
            take = comm.take
            comm.take = lambda nbytes: (taken.append((rank, nbytes)), take(nbytes))[1]
            return naive.all_reduce(np.ones(10, np.float32))(comm, tag)

        return schedule

    simulate(3, plan)
    assert sorted(taken) == [(rank, 40) for rank in range(3) for _ in range(3)]


def test_the_result_of_one_sum_is_the_source_of_the_next():
    first, second = [np.full(7, 1.0 + rank) for rank in range(3)], [np.empty(7) for _ in range(3)]
    simulate(3, lambda rank: naive.all_reduce(second[rank], source=first[rank]))
    simulate(3, lambda rank: naive.all_reduce(first[rank], source=second[rank]))
    np.testing.assert_array_equal(second, 6.0)
    np.testing.assert_array_equal(first, 18.0)
