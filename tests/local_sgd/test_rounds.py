"""The course of rounds; the trajectories of training are in `tests/multiprocess/test_local_sgd.py`."""

import functools
import types

import numpy as np
import pytest

from tfdist.local_sgd.course import Progress, Turn
from tfdist.local_sgd.exchanges import Exchanges
from tfdist.local_sgd.intervals import Every
from tfdist.local_sgd.rounds import Rounds, Settings
from tfdist.local_sgd.rules import Averaging


def made(group=None, variables=2, slots=0, interval=4, **settings):
    group = group or types.SimpleNamespace(size=1)
    exchanges = [Exchanges(group, name, "abcdef") for name in ("one", "all")]
    values = [np.zeros(3) for _ in range(variables)]
    rule = functools.partial(Averaging, settings.pop("mix", 0.0))
    return Rounds(*exchanges, group.size, values, slots, Settings(Every(interval), rule, **settings), 0.1)


def test_fragments_take_turns():
    rounds = made(interval=4, fragments=2)
    assert rounds.first(0) == Turn(2, 0)
    turn, _ = rounds.exchange(0, Progress(8, 2), 0.1, [np.ones(3)])
    assert turn == Turn(2, 1)
    turn, new = rounds.exchange(1, Progress(16, 4), 0.1, [np.full(3, 5.0)])
    assert turn == Turn(2, 0)
    np.testing.assert_array_equal(new, [[5.0] * 3])
    np.testing.assert_array_equal(rounds.centre, [[1.0] * 3, [5.0] * 3])


def test_a_delay_lies_between_begin_and_end():
    rounds = made(variables=1, interval=5, delay=2, mix=0.5)
    assert rounds.first(0) == Turn(5, 0)
    assert rounds.begin(0, Progress(5, 5), 0.1, [np.full(3, 4.0)]) == Turn(2, 1)
    turn, new = rounds.end(Progress(7, 7), [np.full(3, 6.0)])
    assert turn == Turn(3, 0), "the next one begins five steps after this one"
    np.testing.assert_array_equal(new, [[5.0] * 3])
    np.testing.assert_array_equal(rounds.centre, [[4.0] * 3])


def test_everything_is_averaged_at_the_start():
    rounds = made(variables=1, slots=2, start_after=2)
    assert rounds.first(0) == Turn(1, rounds.everything)
    assert rounds.places(rounds.everything) == [0, 1, 2]
    turn, new = rounds.average(Progress(1, 1), 0.1, [np.full(3, float(value)) for value in range(3)])
    assert turn == Turn(1, rounds.everything)
    np.testing.assert_array_equal(new, [[0.0] * 3, [1.0] * 3, [2.0] * 3])
    turn, _ = rounds.average(Progress(2, 2), 0.1, new)
    assert turn == Turn(4, 0)


def test_slots_are_averaged_only_if_requested():
    assert made(variables=2, slots=1, averages_slots=True).places(0) == [0, 1, 2]
    assert made(variables=2, slots=1).places(0) == [0, 1]


@pytest.mark.parametrize("counts", [(4, 4), (0, 8), (9, 1)])
def test_settle_averages_weights_by_samples(ranks, counts):
    def work(group):
        rounds = made(group, variables=2, slots=1, averages_slots=True)
        for place in (0, 1):
            rounds.assigned(place, np.ones(3), Progress(0, 0))
        values = [np.full(3, float(group.rank)), np.full(3, 2.0 * group.rank), np.full(3, 4.0 * group.rank)]
        return rounds.settle(Progress(counts[group.rank], 3), values), rounds.centre

    share = counts[1] / sum(counts)
    for (step, new, changes), centre in ranks(2)(work):
        assert (step, changes) == (3, True)
        np.testing.assert_allclose(new, [[share] * 3, [2 * share] * 3, [4 * share] * 3])
        np.testing.assert_array_equal(new[:2], centre)


def test_settle_without_new_steps_exchanges_nothing(ranks):
    def work(group):
        rounds = made(group)
        first = rounds.settle(Progress(4, 2), [np.ones(3), np.ones(3)])
        rounds.begin_anew(Progress(4, first.step))
        before = group.engine.communicator.bytes_sent
        again = rounds.settle(Progress(4, 2), [np.full(3, 7.0 + group.rank)] * 2)
        return first, again, group.engine.communicator.bytes_sent - before

    for rank, (first, again, sent) in enumerate(ranks(2)(work)):
        np.testing.assert_array_equal(first.values, np.ones([2, 3]))
        assert (first.changes, again.changes) == (True, False)
        assert again.step == 2
        np.testing.assert_array_equal(again.values, np.full([2, 3], 7.0 + rank))
        assert sent == 6 * 8, "the five numbers of the attendance and the step, and no values"


def test_assignment_moves_the_centre():
    rounds = made(variables=1)
    rounds.assigned(0, np.full(3, 5.0), Progress(2, 2))
    rounds.exchange(0, Progress(4, 4), 0.1, [np.full(3, 6.0)])
    np.testing.assert_array_equal(rounds.centre, [[6.0] * 3])


def test_settle_exchanges_nothing_if_all_was_assigned(ranks):
    """An outer optimizer with momentum would move it."""

    def work(group):
        rounds = made(group, variables=2)
        rounds.assigned(0, np.ones(3), Progress(4, 4))
        assert rounds.settle(Progress(4, 4), [np.ones(3), np.zeros(3)]).changes
        rounds.begin_anew(Progress(4, 4))
        for place in (0, 1):
            rounds.assigned(place, np.ones(3), Progress(8, 8))
        return rounds.settle(Progress(8, 8), [np.ones(3), np.ones(3)]).changes

    assert ranks(2)(work) == [False, False]


def test_assignment_replaces_exchange_under_way():
    rounds = made(variables=1, delay=2, mix=0.5)
    rounds.begin(0, Progress(4, 4), 0.1, [np.full(3, 4.0)])
    rounds.assigned(0, np.full(3, 100.0), Progress(5, 5))
    _, new = rounds.end(Progress(6, 6), [np.full(3, 101.0)])
    np.testing.assert_array_equal(new, [[101.0] * 3])
    np.testing.assert_array_equal(rounds.centre, [[100.0] * 3])
    rounds.begin(0, Progress(8, 8), 0.1, new)
    rounds.end(Progress(10, 10), new)
    np.testing.assert_array_equal(rounds.centre, [[101.0] * 3])


def test_rank_without_steps_takes_values_of_others(ranks):
    """Rank 0 takes no step at all, rank 1 makes an exchange of each fragment, and both then end."""

    def work(group):
        rounds = made(group, fragments=2)
        values = [np.full(3, 1.0), np.full(3, 2.0)]
        if group.rank == 0:
            return rounds.settle(Progress(0, 0), [np.zeros(3)] * 2)
        for number in (0, 1):
            _, exchanged = rounds.exchange(number, Progress(4 * number + 4, number + 1), 0.1, [values[number]])
            values[number] = exchanged[0] + 1
        return rounds.settle(Progress(12, 3), values)

    for step, new, _ in ranks(2)(work):
        assert step == 3
        np.testing.assert_array_equal(new, [[2.0] * 3, [3.0] * 3])


def test_more_fragments_than_variables():
    with pytest.raises(ValueError, match="fragments=3"):
        made(variables=2, fragments=3)
