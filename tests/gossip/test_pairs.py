import numpy as np

from tests.gossip.conftest import until
from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.pairs import PairwiseMixing
from tfdist.gossip.topologies import Complete, Ring


def made(group, topology=None):
    mixing = PairwiseMixing(MessageChannels(group, "a"), topology or Ring(), group.rank, group.size)
    mixing.begin([np.zeros(2)])
    return mixing


def test_pairwise_mixing_keeps_sums_and_approaches_consensus(ranks):
    def work(group):
        mixing = made(group, Complete())
        weights = [np.array([float(group.rank), 1.0])]
        while sum(mixing.staleness.values()) < 40 and mixing._left:
            weights = mixing.mix(weights)
        return mixing.finish(weights)[0].tolist()

    results = np.array(ranks(4)(work))
    np.testing.assert_allclose(results.sum(axis=0), [6, 4])
    assert np.ptp(results[:, 0]) < 1.5
    np.testing.assert_allclose(results[:, 1], 1)


def test_simultaneous_requests_are_averaged_once(ranks):
    def work(group):
        mixing = made(group)
        weights = mixing.mix([np.full(2, float(group.rank))])

        def next_turn():
            nonlocal weights
            asked = mixing._asked
            mixed = mixing.mix(weights)
            changed = (mixed[0] != weights[0]).any()
            weights = mixed
            return weights if changed and asked is not None else None

        until(next_turn)
        return weights[0][0], mixing.finish(weights)[0][0]

    assert ranks(2)(work) == [(0.5, 0.5), (0.5, 0.5)]


def test_answer_uses_current_weights_of_answering_rank(ranks):
    """Rank 0 asks with 0; rank 1 has 1 then, which has become 3 when it answers: it keeps half of the difference."""

    def work(group):
        mixing = made(group)
        if group.rank == 0:
            weights = mixing.mix([np.zeros(2)])
            while not mixing.staleness:
                weights = mixing.mix(weights)
            return mixing.finish(weights)[0][0]
        message = until(lambda: mixing._lines.arrived(0))
        weights = [np.full(2, 3.0)]
        mixing._answer(0, message, weights)
        return mixing.finish(weights)[0][0]

    assert ranks(2)(work) == [1.5, 1.5]


def test_requests_to_ended_rank_change_nothing(ranks):
    def work(group):
        mixing = made(group)
        weights = [np.full(2, float(group.rank))]
        for _ in range(50 * group.rank):
            weights = mixing.mix(weights)
        return mixing.finish(weights)[0][0]

    assert ranks(2)(work) == [0.0, 1.0]


def test_assigned_values_are_not_averaged_with_earlier_weights(ranks):
    def work(group):
        mixing = made(group)
        if group.rank == 0:
            mixing.mix([np.full(2, 50.0)])
        mixing.assigned(0)
        weights = mixing.mix([np.full(2, 1.0)])
        return mixing.finish(weights)[0][0]

    assert ranks(2)(work) == [1.0, 1.0]
