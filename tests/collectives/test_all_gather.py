import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.all_gather import all_gather, all_gather_rows


@pytest.mark.parametrize("size", [2, 3, 5])
def test_parts_of_unequal_lengths_reach_all_ranks(size):
    lengths = [(rank * 3) % 4 for rank in range(size)]
    buffers = [
        [np.full(length, float(owner if owner == rank else -1)) for owner, length in enumerate(lengths)]
        for rank in range(size)
    ]
    _, communicators = simulate(size, lambda rank: all_gather(buffers[rank]))
    for parts in buffers:
        for owner, part in enumerate(parts):
            assert (part == owner).all()
    for rank, communicator in enumerate(communicators):
        passed_on = [lengths[(rank - step) % size] for step in range(size - 1)]
        assert communicator.messages_sent == sum(length > 0 for length in passed_on)
        assert communicator.bytes_sent == 8 * sum(passed_on)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_rows_are_gathered_with_their_counts(size, shape):
    rows = [np.full((rank, *shape), rank, np.int32) for rank in range(size)]
    results, _ = simulate(size, lambda rank: all_gather_rows(rows[rank]))
    expected = np.concatenate(rows)
    for gathered, counts in results:
        assert gathered.dtype == np.int32
        assert (gathered == expected).all()
        assert counts.tolist() == list(range(size))
