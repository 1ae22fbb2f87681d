import math

import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.all_to_all import all_to_all
from tfdist.collectives.barrier import barrier
from tfdist.collectives.reduce_scatter import reduce_scatter
from tfdist.collectives.schedule import partition


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", [0, 1, 10, 101])
def test_reduce_scatter_sums_each_ranks_part(size, length):
    generator = np.random.default_rng(0)
    buffers = [generator.integers(0, 9, length).astype(np.float64) for _ in range(size)]
    expected = np.sum(buffers, axis=0)
    parts = partition(length, size)
    results, communicators = simulate(size, lambda rank: reduce_scatter([buffers[rank][part] for part in parts]))
    for rank, part in enumerate(parts):
        assert (results[rank] == expected[part]).all()
    assert sum(communicator.bytes_sent for communicator in communicators) == 8 * length * (size - 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_to_all_exchanges_every_block(size):
    given = [[np.full(rank + target, 10.0 * rank + target) for target in range(size)] for rank in range(size)]
    taken = [[np.empty(source + rank) for source in range(size)] for rank in range(size)]
    _, communicators = simulate(size, lambda rank: all_to_all(given[rank], taken[rank]))
    for rank in range(size):
        for source in range(size):
            assert (taken[rank][source] == 10.0 * source + rank).all()
    assert all(communicator.messages_sent == size - 1 for communicator in communicators)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_barrier_sends_one_message_per_round(size):
    _, communicators = simulate(size, lambda rank: barrier())
    rounds = math.ceil(math.log2(size))
    assert all(communicator.messages_sent == rounds for communicator in communicators)
