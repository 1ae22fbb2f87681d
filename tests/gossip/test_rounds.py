import numpy as np
import pytest

from tfdist.compression import Schedule, TopK
from tfdist.gossip.encodings import Differences, Plain
from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.messages import GossipMessage, MessageKind
from tfdist.gossip.rounds import SynchronousMixing
from tfdist.gossip.topologies import ExponentialGraph, RandomPairs, Ring


def made(group, topology=None, overlaps=False, encoding=None):
    mixing = SynchronousMixing(
        MessageChannels(group, "a"), topology or Ring(), encoding or Plain(), group.rank, group.size, overlaps
    )
    mixing.begin([np.zeros(2)])
    return mixing


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("topology", [Ring(), ExponentialGraph(), RandomPairs()], ids=repr)
def test_synchronous_mixing_keeps_sums_and_reaches_consensus(ranks, topology, overlaps):
    def work(group):
        mixing = made(group, topology, overlaps)
        weights = [np.array([float(group.rank), 1.0])]
        for _ in range(40):
            weights = mixing.mix(weights)
        return mixing.finish(weights)[0].tolist()

    results = np.array(ranks(4)(work))
    np.testing.assert_allclose(results.sum(axis=0), [6, 4])
    np.testing.assert_allclose(results, [[1.5, 1]] * 4, atol=1e-5)


def test_overlap_uses_weights_one_step_later(ranks):
    def work(group):
        mixing = made(group, overlaps=True)
        seen = []
        weights = [np.full(2, float(group.rank))]
        for _ in range(3):
            weights = mixing.mix(weights)
            seen.append(weights[0][0])
            weights[0] += 10.0  # a step
        return [*seen, mixing.finish(weights)[0][0]]

    assert ranks(2)(work) == [[0.0, 10.5, 20.5, 30.5], [1.0, 10.5, 20.5, 30.5]]


class Recorded:
    """Message channels from two neighbours, of which rank 1 has ended; keeps whether each transfer overlaps."""

    def __init__(self):
        self.overlaps = []

    def send(self, rank, message, overlaps):
        self.overlaps.append(overlaps)

    def expect(self, rank, overlaps):
        self.overlaps.append(overlaps)

    def await_next(self, rank):
        return GossipMessage(MessageKind.WEIGHTS, parts=[np.ones(2)]) if rank == 2 else GossipMessage(MessageKind.ENDED)


def test_message_that_no_wait_follows_is_sent_beside_the_next_step():
    """On a directed graph a source may have ended when a target has not."""
    lines = Recorded()
    mixing = SynchronousMixing(lines, ExponentialGraph(), Plain(), 0, 3, overlaps=False)
    mixing.begin([np.zeros(2)])
    for expected in ([False, False], [False, False], [False], [True]):
        lines.overlaps.clear()
        mixing.mix([np.zeros(2)])
        assert lines.overlaps == expected


def test_neighbours_that_have_ended_are_left_out(ranks):
    """Rank 1 of a ring of three ends after one round, rank 0 after two."""

    def work(group):
        mixing = made(group)
        weights = [np.full(2, float(3 * group.rank))]
        for _ in range((2, 1, 4)[group.rank]):
            weights = mixing.mix(weights)
        return mixing.finish(weights)[0][0]

    first = (0 + 3 + 6) / 3
    assert ranks(3)(work) == [first, first, first]


def test_neighbour_that_makes_no_round_is_ignored(ranks):
    def work(group):
        mixing = made(group)
        weights = [np.full(2, float(group.rank))]
        for _ in range(3 * group.rank):
            weights = mixing.mix(weights)
        return mixing.finish(weights)[0][0]

    assert ranks(2)(work) == [0.0, 1.0]


def test_value_assigned_during_overlap_is_kept(ranks):
    def work(group):
        mixing = made(group, overlaps=True)
        mixing.mix([np.full(2, float(group.rank)), np.full(1, float(group.rank))])
        mixing.assigned(0)
        return [array[0] for array in mixing.mix([np.full(2, 7.0), np.full(1, float(group.rank))])]

    assert ranks(2)(work) == [[7.0, 0.5], [7.0, 0.5]]


def test_begin_resets_copies(ranks):
    """With other weights than those at the end of the rounds before."""

    def work(group):
        mixing = made(group, encoding=Differences([Schedule({0: TopK(0.5)})], 0.5, group.rank))
        for start in (0.0, 100.0):
            mixing.begin([np.full(2, start)])
            weights = [start + np.array([group.rank, 4.0 * group.rank])]
            weights = mixing.mix(weights)
            change = mixing.finish(weights)[0] - start
            np.testing.assert_allclose(change, [group.rank, 4 * group.rank + (1 - 2 * group.rank)])
        return True

    assert ranks(2)(work) == [True, True]
