import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.powers_of_two import folded

SIZES = range(1, 18)


def run(size, core, in_place=True):
    """Folds vectors that hold 2 to the power of their rank; returns the buffers, the inputs and the messages."""
    given = [np.full(3, 2.0**rank) for rank in range(size)]
    buffers = given if in_place else [np.full(3, np.nan) for _ in range(size)]

    def plan(rank):
        return lambda comm, tag: folded(comm, tag, given[rank], buffers[rank], np.add, core(rank, buffers[rank]))

    _, communicators = simulate(size, plan)
    return buffers, given, [communicator.messages_sent for communicator in communicators]


@pytest.mark.parametrize("size", SIZES)
def test_core_runs_on_a_power_of_two_of_ranks(size):
    places = {}

    def core(rank, buffer):
        def algorithm(given, place, power, rank_of):
            assert power == 1 << (size.bit_length() - 1)
            assert rank_of(place) == rank
            places[place] = [rank_of(other) for other in range(power)]
            buffer[...] = given
            yield ()

        return algorithm

    run(size, core)
    assert sorted(places) == list(range(1 << (size.bit_length() - 1)))
    assert len({tuple(ranks) for ranks in places.values()}) == 1, "the ranks differ in who has which place"


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_all_vectors_are_in_the_core_once(size, in_place):
    entered = []

    def core(rank, buffer):
        def algorithm(given, place, power, rank_of):
            entered.append(given.copy())
            buffer[...] = -1.0 - rank  # as a result
            yield ()

        return algorithm

    buffers, given, messages = run(size, core, in_place)
    np.testing.assert_array_equal(np.sum(entered, axis=0), 2.0**size - 1)
    extra = size - (1 << (size.bit_length() - 1))
    for rank, buffer in enumerate(buffers):
        paired = rank < 2 * extra
        has_it = rank + 1 if paired and rank % 2 == 0 else rank
        np.testing.assert_array_equal(buffer, -1.0 - has_it)
        assert messages[rank] == paired
        if not in_place:
            np.testing.assert_array_equal(given[rank], 2.0**rank)
