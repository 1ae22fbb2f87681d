import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import tree

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("combine", [np.add, np.maximum])
def test_reduce_to_rank_0(size, combine):
    generator = np.random.default_rng(size)
    buffers = [generator.integers(0, 9, 50) for _ in range(size)]
    expected = combine.reduce([buffer.copy() for buffer in buffers])
    _, communicators = simulate(size, lambda rank: tree.reduce(buffers[rank], combine))
    np.testing.assert_array_equal(buffers[0], expected)
    assert [communicator.messages_sent for communicator in communicators] == [0] + [1] * (size - 1)


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_sends_to_its_parent(size):
    """The parent's number is the rank's own without the lowest set bit."""
    sums = [np.array([float(rank)]) for rank in range(size)]
    simulate(size, lambda rank: tree.reduce(sums[rank]))
    for rank, total in enumerate(sums):
        below = rank & -rank or size  # how many ranks there are in a complete subtree
        assert total == sum(range(rank, min(rank + below, size)))


@pytest.mark.parametrize("size", SIZES)
def test_vectors_are_combined_in_the_order_of_the_ranks(size):
    """Neighbours first: equal to any other bracketing, although operands may not be swapped."""

    def lower(own, other, out):
        np.copyto(out, own)

    def upper(own, other, out):
        np.copyto(out, other)

    for combine, expected in ((lower, 0.0), (upper, size - 1.0)):
        buffers = [np.full(3, float(rank)) for rank in range(size)]
        simulate(size, lambda rank, combine=combine, buffers=buffers: tree.all_reduce(buffers[rank], combine))
        np.testing.assert_array_equal(buffers, expected)


def test_broadcast_result_replaces_partial_sums():
    buffers = [np.full(10, 1.0) for _ in range(6)]
    sources = [np.full(10, 2.0**rank) for rank in range(6)]
    simulate(6, lambda rank: tree.all_reduce(buffers[rank], source=sources[rank]), segment_bytes=16)
    np.testing.assert_array_equal(buffers, 63.0)
    for rank, source in enumerate(sources):
        np.testing.assert_array_equal(source, 2.0**rank)
