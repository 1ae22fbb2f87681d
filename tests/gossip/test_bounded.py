import threading
import time

import numpy as np
import pytest

from tfdist.gossip.bounded import BoundedStalenessMixing
from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.topologies import Complete, Ring


def made(group, bound, topology=None):
    mixing = BoundedStalenessMixing(MessageChannels(group, "a"), topology or Ring(), group.rank, group.size, bound)
    mixing.begin([np.zeros(2)])
    return mixing


@pytest.mark.parametrize("bound", [0, 1, 3, 20])
def test_ranks_approach_consensus_within_staleness_bound(ranks, bound):
    def work(group):
        mixing = made(group, bound)
        weights = [np.array([float(group.rank), 1.0])]
        for _ in range(60 if bound < 20 else 1000):  # what is old counts less
            weights = mixing.mix(weights)
        assert not mixing.staleness or max(mixing.staleness) <= bound
        return mixing.finish(weights)[0].tolist()

    results = np.array(ranks(4)(work))
    assert np.ptp(results[:, 0]) < {0: 1e-9, 20: 1.5}.get(bound, 0.5), "at first it is 3"
    assert 0.5 < results[:, 0].mean() < 2.5
    np.testing.assert_allclose(results[:, 1], 1)


def test_fast_rank_waits_at_the_staleness_bound(ranks):
    """Rank 1 does nothing before rank 0 has made as many rounds as it may; then it waits."""
    free = threading.Event()

    def work(group):
        mixing = made(group, bound=3)
        weights = [np.full(2, float(group.rank))]
        if group.rank == 0:
            for _ in range(3):
                weights = mixing.mix(weights)
            assert not mixing.staleness
            free.set()
            weights = mixing.mix(weights)  # waits for round 0 of rank 1
            assert mixing.staleness == {3: 1}
            assert weights[0][0] == pytest.approx(0.5 / (1 + 3))
        else:
            assert free.wait(100)
            weights = mixing.mix(weights)
        return mixing.finish(weights)[0][0]

    ranks(2)(work)


def test_bound_of_zero_equals_synchronous_gossip(ranks):
    def work(group):
        mixing = made(group, 0, Complete())
        weights = mixing.mix([np.full(2, float(group.rank))])
        return mixing.finish(weights)[0][0]

    np.testing.assert_allclose(ranks(3)(work), 1.0)


def test_assigned_values_are_not_mixed_with_earlier_weights(ranks):
    def work(group):
        mixing = made(group, bound=5)
        if group.rank == 0:
            mixing.mix([np.full(2, 50.0)])
        mixing.assigned(0)
        weights = mixing.mix([np.full(2, 1.0)])
        return mixing.finish(weights)[0][0]

    assert ranks(2)(work) == [1.0, 1.0]


def test_own_weights_are_kept_for_few_rounds_only(ranks):
    def work(group):
        mixing = made(group, bound=2)
        weights = [np.zeros(2)]
        most = 0
        for _ in range(30):
            weights = mixing.mix(weights)
            most = max(most, len(mixing._own))
        mixing.finish(weights)
        return most

    assert max(ranks(3)(work)) <= 3


def test_a_slow_neighbours_weights_count_after_those_of_a_fast_one(ranks):
    """Rank 2 makes its round when rank 0 has mixed with rank 1's weights of the same round."""
    free, taken = threading.Event(), threading.Event()

    def work(group):
        mixing = made(group, bound=1000)
        weights = [np.full(2, float(group.rank))]
        if group.rank == 2:
            assert free.wait(100)
        if group.rank:
            mixing.mix(weights)
            assert taken.wait(100)
        else:
            for count, event in ((1, free), (2, taken)):
                end = time.monotonic() + 100
                while mixing.staleness.total() < count and time.monotonic() < end:
                    weights = mixing.mix(weights)
                    time.sleep(0.01)
                event.set()
            assert mixing.staleness.total() == 2
        mixing.finish(weights)

    ranks(3)(work)


def test_ended_neighbour_takes_part_after_new_begin(ranks):
    def work(group):
        mixing = made(group, bound=1000)
        weights = [np.full(2, float(group.rank))]
        while group.rank == 0 and mixing._left:  # until it has heard of the end of rank 1
            weights = mixing.mix(weights)
        mixing.finish(weights)
        mixing.begin(weights)
        mixing.staleness.clear()
        mixing.finish(mixing.mix(weights))
        return mixing.staleness.total()

    assert ranks(2)(work) == [1, 1]
