import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.reduce_scatter import reduce_scatter


def parts_of(size, dtype=np.int64):
    """Returns the parts of each rank, whose lengths differ and may be 0."""
    generator = np.random.default_rng(size)
    return [[generator.integers(-9, 9, 3 * place % 7).astype(dtype) for place in range(size)] for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("combine", [np.add, np.maximum, np.multiply])
def test_each_rank_gets_its_own_part(size, combine):
    parts = parts_of(size)
    expected = [combine.reduce([given[place].copy() for given in parts]) for place in range(size)]
    results, _ = simulate(size, lambda rank: reduce_scatter(parts[rank], combine))
    for rank in range(size):
        np.testing.assert_array_equal(results[rank], expected[rank])


def test_result_lies_in_the_part_that_was_given():
    parts = parts_of(4)
    results, _ = simulate(4, lambda rank: reduce_scatter(parts[rank]))
    for rank in range(4):
        assert results[rank] is parts[rank][rank]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_bytes_sent_are_half_of_a_ring_all_reduce(size):
    buffers = [np.ones((size, 60), np.float32) for _ in range(size)]
    _, communicators = simulate(size, lambda rank: reduce_scatter(list(buffers[rank])))
    for communicator in communicators:
        assert communicator.messages_sent == size - 1
        assert communicator.bytes_sent == 4 * 60 * (size - 1)


def test_long_parts_are_reduced_in_segments():
    parts = [[np.arange(101.0) * (1 + rank) + place for place in range(3)] for rank in range(3)]
    expected = [np.sum([given[place] for given in parts], axis=0) for place in range(3)]
    results, _ = simulate(3, lambda rank: reduce_scatter(parts[rank]), segment_bytes=64)
    np.testing.assert_array_equal(results, expected)
