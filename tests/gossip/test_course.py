import numpy as np
import pytest

from tfdist.gossip.course import Gossiping
from tfdist.gossip.encodings import Plain
from tfdist.gossip.lines import MessageChannels
from tfdist.gossip.rounds import SynchronousMixing
from tfdist.gossip.topologies import Ring
from tfdist.local_sgd.course import Progress, Turn, VariableGroup
from tfdist.local_sgd.intervals import Every, Growing


def made(group, interval=None):
    def mixing(trained):
        return SynchronousMixing(MessageChannels(group, trained.name), Ring(), Plain(), group.rank, group.size, False)

    courses = Gossiping(group, interval or Every(2), mixing, "described")
    assert courses.described == "described"
    course = courses.of(VariableGroup("optimizer 0", ["a", "b"], [np.zeros(3), np.zeros(1)], 0.1))
    course.begin_anew(Progress(0, 0))
    return course


def test_rounds_come_at_intervals(ranks):
    def work(group):
        course = made(group, Growing(first=2, every=4))
        assert (course.turns, course.places(0), course.replaces(0)) == (1, [0, 1], True)
        assert course.begin_anew(Progress(0, 0)) == Turn(2, 0)
        turn, new = course.take(0, Progress(8, 4), 0.1, [np.full(3, float(group.rank)), np.zeros(1)])
        assert turn == Turn(4, 0)
        return new[0].tolist()

    assert ranks(2)(work) == [[0.5] * 3] * 2
    assert ranks(1)(work) == [[0.0] * 3]


def test_settle_averages_ranks_that_have_trained(ranks):
    def work(group):
        course = made(group)
        weights = [np.full(3, float(group.rank)), np.ones(1)]
        step, new, changes = course.settle(Progress(8 * group.rank, 1 + 2 * group.rank), weights)
        assert (step, changes) == (5, True)
        for array, other in zip(new, course.centre, strict=True):
            np.testing.assert_array_equal(array, other)
            assert array is not other
        return new[0][0].item(), course.distance

    results = ranks(3)(work)
    assert [average for average, _ in results] == [1.5] * 3
    length = np.sqrt(3 * 1.5**2 + 1)
    away = np.sqrt(3 * (1.5**2 + 0.5**2 + 0.5**2) / 3)
    np.testing.assert_allclose([distance for _, distance in results], away / length)


def test_settle_without_steps_changes_nothing(ranks):
    def work(group):
        course = made(group)
        settled = course.settle(Progress(0, 0), [np.full(3, 7.0), np.ones(1)])
        return settled.changes, settled.values[0][0].item(), course.distance

    assert ranks(2)(work) == [(False, 7.0, None)] * 2


def test_assigned_value_becomes_the_centre(ranks):
    def work(group):
        course = made(group)
        course.assigned(1, np.full(1, 5.0), Progress(0, 0))
        return course.centre[1].item()

    assert ranks(2)(work) == [5.0, 5.0]
    assert ranks(1)(work) == [5.0]


def test_course_counts_staleness_of_its_rounds(ranks):
    def work(group):
        course = made(group)
        for step in (2, 4):
            course.take(0, Progress(step, step), 0.1, [np.zeros(3), np.zeros(1)])
        return dict(course.staleness)

    assert ranks(2)(work) == [{0: 2}, {0: 2}]
    assert ranks(1)(work) == [{}]


@pytest.mark.parametrize("length", [0.0, 2.0])
def test_distance_is_absolute_if_mean_is_zero(ranks, length):
    def work(group):
        course = made(group)
        weights = [np.full(3, length * (1 - 2 * group.rank)), np.zeros(1)]
        course.settle(Progress(1, 1), weights)
        return course.distance

    assert ranks(2)(work) == [pytest.approx(length * np.sqrt(3))] * 2
