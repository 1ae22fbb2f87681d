import numpy as np

from tfdist.gossip.encodings import Plain
from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.messages import MessageKind
from tfdist.gossip.mixing import Mixing, added, like
from tfdist.gossip.rounds import SynchronousMixing
from tfdist.gossip.topologies import as_topology


class Shouting(Mixing):
    """Sends its weights to all, and hears them at the end only."""

    heard = ()

    def mix(self, values):
        for rank in self._left:
            self._lines.send(rank, self._message(MessageKind.WEIGHTS, values))
        self._round += 1
        return list(values)

    def _handle_late_message(self, rank, message, values):
        self.heard = (*self.heard, (rank, message.round, message.generation))
        values[0] += like(message.parts, values)[0]


def test_finish_handles_messages_sent_before_the_end(ranks):
    def work(group):
        others = [rank for rank in range(group.size) if rank != group.rank]
        mixing = Shouting(MessageChannels(group, "a"), others)
        results = []
        for _ in range(2):  # the lines are empty then
            mixing.heard = ()
            mixing.begin([np.zeros(2)])
            for number in range(group.rank):
                mixing.assigned(0)
                assert mixing.mix([np.full(2, 10.0**number)])
            results.append(mixing.finish([np.zeros(2)])[0][0])
            assert sorted(mixing.heard) == [
                (rank, round_number, round_number + 1) for rank in others for round_number in range(rank)
            ]
        return results

    assert ranks(3)(work) == [[12.0, 12.0], [11.0, 11.0], [1.0, 1.0]]


class Wishing:
    def __init__(self, is_requested):
        self.is_requested, self.learned = is_requested, []

    def own(self):
        return int(self.is_requested)

    def learn(self, wishes):
        self.learned.append(wishes)


def test_a_wish_to_stop_is_passed_on_from_neighbour_to_neighbour(ranks):
    """Along a line of three, of which the first one wishes it; and is forgotten when all begin anew."""
    line = as_topology({0: [1], 1: [0, 2], 2: [1]})

    def work(group):
        mixing = SynchronousMixing(MessageChannels(group, "a"), line, Plain(), group.rank, group.size, overlaps=False)
        wishes = mixing.wishes = Wishing(is_requested=group.rank == 0)
        rounds = []
        for _ in range(2):
            mixing.begin([np.zeros(2)])
            count = 0
            while not (wishes.learned or wishes.is_requested or count == 5):
                mixing.mix([np.zeros(2)])
                count += 1
            mixing.finish([np.zeros(2)])
            rounds.append((count, list(wishes.learned)))
            wishes.is_requested = False
            wishes.learned.clear()
        return rounds

    first, second, third = ranks(3)(work)
    assert first == [(0, []), (5, [])]
    assert second == [(1, [1]), (5, [])]
    assert third == [(2, [1]), (5, [])]


def test_sums_are_arrays():
    sums = added([np.array(1.0), np.ones(2)], [np.array(2.0), np.full(2, 3.0)])
    assert all(isinstance(array, np.ndarray) for array in sums)
    np.testing.assert_array_equal(sums[0], 3)
    np.testing.assert_array_equal(sums[1], [4, 4])
