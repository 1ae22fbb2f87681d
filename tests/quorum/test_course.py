"""Rounds of several processes, here threads with real links and bookkeeping, against NumPy."""

import keras
import numpy as np
import pytest

from tfdist.compression import Int8, policy
from tfdist.errors import MismatchError, RendezvousError
from tfdist.local_sgd.course import Live, Progress, VariableGroup
from tfdist.local_sgd.intervals import Every
from tfdist.local_sgd.rules import Averaging, Outer
from tfdist.quorum.course import QuorumRounds, QuorumRoundsFactory
from tfdist.quorum.members import SingleProcessMembers

START = [np.arange(6.0).reshape(2, 3), np.ones(4)]
NAME = "optimizer 0"


class Training(Live):
    def __init__(self, left=3, step=0):
        self._left, self._step = left, step
        self.slots = np.full(2, 7.0)

    def state(self):
        return [self.slots.copy()]

    def left(self):
        return self._left

    def step(self):
        return self._step


def course(members, start=START, rule=None, compression=None, settings="alike", live=None, are_weights=True):
    trained = VariableGroup(NAME, ["a", "b", "slot"], [value.copy() for value in start], 0.1, live or Training())
    chosen = None if compression is None else policy.as_policy(compression)
    return QuorumRounds(members, Every(5), rule or Averaging(), chosen, trained, settings, are_weights)


def change(task, number):
    """Returns the change of a task's weights in a round."""
    generator = np.random.default_rng([task, number])
    return [generator.normal(size=value.shape) for value in START]


def joined(job, tasks, **arguments):
    """The courses of tasks, of which the first has the state, at the beginning."""
    first = course(job.members[tasks[0]], **arguments)
    others = [course(job.members[task], [value + 1 for value in START], **arguments) for task in tasks[1:]]
    courses = dict(zip(tasks, [first, *others], strict=True))
    for task in tasks[1:]:
        courses[task].refresh()
    for each_course in courses.values():
        each_course.begin_anew(Progress(0, 0))
    return courses


def trained(rounds, task, number):
    return [value + delta for value, delta in zip(rounds.centre, change(task, number), strict=True)]


def take(courses, task, number, samples):
    return courses[task].take(0, Progress(samples, 5 * number), 0.1, trained(courses[task], task, number))


def assert_values(actual, expected, rtol=1e-12):
    for value, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=rtol)


def assert_alike(courses):
    for rounds in courses.values():
        for value, other in zip(rounds.centre, next(iter(courses.values())).centre, strict=True):
            assert np.asarray(value).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("outer", [False, True])
def test_trajectories_equal_those_of_numpy(job, outer):
    made = job(3, quorum=3)

    def rule():
        return Outer(keras.optimizers.SGD(0.75, momentum=0.875, nesterov=True)) if outer else Averaging()

    courses = {0: course(made.members[0], rule=rule())}
    for task in (1, 2):
        courses[task] = course(made.members[task], [value * 0 for value in START], rule=rule())
        assert courses[task].joined.step == 0
    for each_course in courses.values():
        each_course.begin_anew(Progress(0, 0))
    assert_values(courses[2].centre, START)
    weights, velocity = [value.copy() for value in START], [np.zeros_like(value) for value in START]
    samples = [10, 20, 50]
    for number in range(1, 5):
        results = made.side_by_side(lambda task, n=number: take(courses, task, n, n * samples[task]), range(3))
        means = [
            sum(count * change(task, number)[place] for task, count in enumerate(samples)) / sum(samples)
            for place in range(2)
        ]
        if outer:
            velocity = [0.875 * v + 0.75 * mean for v, mean in zip(velocity, means, strict=True)]
            weights = [w + 0.875 * v + 0.75 * mean for w, v, mean in zip(weights, velocity, means, strict=True)]
        else:
            weights = [w + mean for w, mean in zip(weights, means, strict=True)]
        for turn, new in results:
            assert turn.left == 5
            assert_values(new, weights)
        assert_alike(courses)
    assert [each_course.staleness for each_course in courses.values()] == [{0: 4}] * 3
    assert [each_course.round for each_course in courses.values()] == [4] * 3


def test_late_task_continues_from_new_centre_and_contributes_later(job):
    made = job(3, quorum=2)
    courses = joined(made, [0, 1, 2])
    first = made.side_by_side(
        lambda task: (
            take(courses, task, 1, 10)
            if task < 2
            else made.until(lambda: len(made.waiting(NAME)) == 2) or made.expire()
        ),
        range(3),
    )
    weights = [w + (a + b) / 2 for w, a, b in zip(START, change(0, 1), change(1, 1), strict=True)]
    assert_values(first[0][1], weights)
    late = trained(courses[2], 2, 1)
    turn, new = courses[2].take(0, Progress(10, 5), 0.1, late)
    assert turn.left == 3, "as many steps as the source has left"
    assert_values(new, [w + delta for w, delta in zip(weights, change(2, 1), strict=True)])

    def second(task):
        if task < 2:
            return take(courses, task, 2, 20)
        values = [value + delta for value, delta in zip(new, change(2, 2), strict=True)]
        return courses[2].take(0, Progress(16, 8), 0.1, values)

    results = made.side_by_side(second, range(3))
    both = [a + b for a, b in zip(change(2, 1), change(2, 2), strict=True)]
    parts = zip(weights, change(0, 2), change(1, 2), both, strict=True)
    assert_values(results[2][1], [w + (10 * a + 10 * b + 16 * c) / 36 for w, a, b, c in parts])
    assert_alike(courses)
    assert courses[2].staleness == {1: 1}


@pytest.mark.parametrize("keeps_late", [True, False])
def test_change_late_at_epoch_end_is_contributed_later_or_dropped(job, keeps_late):
    made = job(2, quorum=1)
    courses = joined(made, [0, 1], are_weights=keeps_late)
    made.side_by_side(
        lambda task: made.until(lambda: made.waiting(NAME)) or made.expire() if task else take(courses, 0, 1, 10),
        range(2),
    )
    settled = courses[1].settle(Progress(10, 4), trained(courses[1], 1, 1))
    weights = [w + delta for w, delta in zip(START, change(0, 1), strict=True)]
    assert settled.changes
    assert_values(settled.values, weights)
    assert courses[1].begin_anew(Progress(10, 4)).left == 3
    results = made.side_by_side(lambda task: take(courses, task, 2, 20), range(2))
    late = change(1, 1) if keeps_late else [0 * value for value in START]
    count = 20 if keeps_late else 10
    parts = zip(weights, change(0, 2), change(1, 2), late, strict=True)
    assert_values(results[0][1], [w + (10 * a + count * (b + c)) / (10 + count) for w, a, b, c in parts])
    assert_alike(courses)
    weights = results[0][1]
    results = made.side_by_side(lambda task: take(courses, task, 3, 30), range(2))
    changes = zip(weights, change(0, 3), change(1, 3), strict=True)
    assert_values(results[0][1], [w + (a + b) / 2 for w, a, b in changes])


def late(made, courses):
    """Task 1 comes to the end of its epoch when a round has been made without it; it has a change to bring later."""
    made.side_by_side(
        lambda task: made.until(lambda: made.waiting(NAME)) or made.expire() if task else take(courses, 0, 1, 10),
        range(2),
    )
    courses[1].settle(Progress(10, 4), trained(courses[1], 1, 1))
    courses[1].begin_anew(Progress(10, 4))


def test_change_late_twice_is_contributed_once(job):
    made = job(2, quorum=1)
    courses = joined(made, [0, 1])
    late(made, courses)
    made.side_by_side(
        lambda task: made.until(lambda: made.waiting(NAME)) or made.expire() if task else take(courses, 0, 2, 20),
        range(2),
    )
    centre = [value.copy() for value in courses[0].centre]
    _, new = courses[1].take(0, Progress(20, 8), 0.1, trained(courses[1], 1, 2))
    both = [a + b for a, b in zip(change(1, 1), change(1, 2), strict=True)]
    assert_values(new, [w + d for w, d in zip(centre, both, strict=True)])

    def third(task):
        if not task:
            return take(courses, 0, 3, 30)
        return courses[1].take(0, Progress(30, 13), 0.1, [a + b for a, b in zip(new, change(1, 3), strict=True)])

    results = made.side_by_side(third, range(2))
    parts = zip(centre, change(0, 3), both, change(1, 3), strict=True)
    assert_values(results[0][1], [w + (10 * a + 30 * (b + c)) / 40 for w, a, b, c in parts])


@pytest.mark.parametrize("how", ["assigned", "followed"])
def test_late_change_of_replaced_values_is_dropped(job, how):
    made = job(2, quorum=1)
    courses = joined(made, [0, 1])
    late(made, courses)
    if how == "assigned":
        courses[1].refresh()
        for each_course in courses.values():
            each_course.assigned(0, START[0] + 5, Progress(10, 4))
    else:
        courses[0].assigned(0, START[0] + 5, Progress(10, 5))
        courses[0].replace()
        assert courses[1].follow(30.0)
        courses[1].begin_anew(Progress(10, 4))
    centre = [value.copy() for value in courses[0].centre]
    results = made.side_by_side(lambda task: take(courses, task, 2, 20), range(2))
    samples = 20 if how == "assigned" else 10
    parts = zip(centre, change(0, 2), change(1, 2), strict=True)
    assert_values(results[0][1], [w + (10 * a + samples * b) / (10 + samples) for w, a, b in parts])


@pytest.mark.parametrize("compression", [None, Int8()])
def test_round_is_repeated_without_lost_task(job, compression):
    made = job(3, quorum=2)
    courses = joined(made, [0, 1, 2], compression=compression)
    # Task 2 says that it is ready, and nothing more.
    made.side_by_side(
        lambda task: (
            take(courses, task, 1, 10)
            if task < 2
            else (made.members[2].ready(NAME, 1, 10, False, courses[2]._checksum()), made.lose(2))
        ),
        range(3),
    )
    del courses[2]
    assert_alike(courses)
    expected = [w + (a + b) / 2 for w, a, b in zip(START, change(0, 1), change(1, 1), strict=True)]
    assert_values(courses[0].centre, expected, rtol=0.1 if compression else 1e-12)
    assert courses[0].round == 1


def test_task_is_told_that_newer_values_are_lost(job, caplog):
    """Task 0 has met without task 1, and is lost before task 1 has fetched what came of it."""
    made = job(2, quorum=1)
    courses = joined(made, [0, 1])
    made.side_by_side(
        lambda task: made.until(lambda: made.waiting(NAME)) or made.expire() if task else take(courses, 0, 1, 10),
        range(2),
    )
    made.lose(0)
    for _ in range(2):
        courses[1].refresh()
    assert_values(courses[1].centre, START)
    told = [record.getMessage() for record in caplog.records if "goes on with" in record.getMessage()]
    assert told == [
        "tfdist: task 1 goes on with the values of optimizer 0 of round 0: all tasks that had those of round 1 are "
        "lost or have ended."
    ]


def test_joining_task_takes_weights_slots_steps_and_outer_optimizer(job):
    made = job(2)
    rules = [Outer(keras.optimizers.SGD(0.5, momentum=0.9)) for _ in range(2)]
    live = Training(left=2, step=35)
    courses = {0: course(made.members[0], rule=rules[0], live=live)}
    courses[0].begin_anew(Progress(0, 0))
    take(courses, 0, 1, 10)
    courses[1] = course(made.members[1], [0 * value for value in START], rule=rules[1])
    assert courses[1].joined.step == 35
    np.testing.assert_array_equal(courses[1].joined.state, [np.full(2, 7.0)])
    assert courses[1].begin_anew(Progress(0, 35)).left == 2
    assert_alike(courses)
    courses[1].refresh()
    made.side_by_side(lambda task: take(courses, task, 2, 20), range(2))
    assert_alike(courses)
    for value, other in zip(rules[0].state(), rules[1].state(), strict=True):
        np.testing.assert_array_equal(value, other)


def test_task_that_joins_in_the_first_round_takes_the_state_from_before_its_steps(job):
    made = job(2)
    live = Training()
    first = course(made.members[0], live=live)
    first.begin_anew(Progress(0, 4))  # as after a restored backup
    live._left, live._step, live.slots = 1, 8, np.full(2, 9.0)
    second = course(made.members[1], [0 * value for value in START])
    assert second.joined.step == 4
    np.testing.assert_array_equal(second.joined.state, [np.full(2, 7.0)])
    assert second.begin_anew(Progress(0, 4)).left == 5


def test_epoch_end_of_another_task_sets_ended(job):
    made = job(2, quorum=2)
    courses = joined(made, [0, 1])

    def work(task):
        values = trained(courses[task], task, 1)
        if task:
            return take(courses, task, 1, 10)
        return courses[0].settle(Progress(10, 3), values)

    made.side_by_side(work, range(2))
    assert (courses[0].ended, courses[1].ended) == (False, True)
    assert_alike(courses)
    courses[1].begin_anew(Progress(10, 5))
    assert not courses[1].ended
    assert courses[0].settle(Progress(10, 3), courses[0].centre).changes is False, "nothing has happened since"


def of_epochs(made, rule=Averaging):
    """The courses of two tasks, with a rule of their own each, that have made a round in an epoch."""
    courses = {0: course(made.members[0], rule=rule()), 1: course(made.members[1], rule=rule())}
    for rounds in courses.values():
        rounds.begin_anew(Progress(0, 0))
        rounds.begin_epoch(0)
    made.side_by_side(lambda task: take(courses, task, 1, 10), range(2))
    return courses


def test_epoch_that_ends_with_a_round_ends_for_others_with_their_next_one(job):
    made = job(2, quorum=2)
    courses = of_epochs(made)
    before = [value.copy() for value in courses[0].centre]

    def work(task):
        return take(courses, 1, 2, 20) if task else courses[0].settle(Progress(10, 5), courses[0].centre)

    settled, _ = made.side_by_side(work, range(2))
    assert settled.changes
    assert (courses[0].ended, courses[1].ended) == (False, True)
    assert_alike(courses)
    assert_values(courses[0].centre, [value + delta for value, delta in zip(before, change(1, 2), strict=True)])
    courses[0].begin_anew(Progress(10, 5))
    assert not courses[0].settle(Progress(10, 5), courses[0].centre).changes, "the epoch has ended already"
    assert not courses[1].settle(Progress(20, 10), courses[1].centre).changes, (
        "which is not told to the one that said so"
    )


def test_epochs_that_end_with_the_same_round_take_no_step_of_the_rule(job):
    made = job(2, quorum=2)
    courses = of_epochs(made, lambda: Outer(keras.optimizers.SGD(0.75, momentum=0.875)))
    before = [value.copy() for value in courses[0].centre]
    made.side_by_side(lambda task: courses[task].settle(Progress(10, 5), courses[task].centre), range(2))
    assert [rounds.ended for rounds in courses.values()] == [False, False]
    assert_values(courses[0].centre, before)
    assert_alike(courses)
    assert courses[0].totals.rounds == 1


def test_steps_after_an_epoch_that_another_has_ended_count_in_the_next_round(job):
    made = job(2, quorum=2)
    courses = of_epochs(made)

    def work(task):
        return take(courses, 1, 2, 20) if task else courses[0].settle(Progress(10, 5), courses[0].centre)

    made.side_by_side(work, range(2))
    kept = courses[1].settle(Progress(30, 12), trained(courses[1], 1, 3))
    assert_values(kept.values, courses[0].centre)
    centre = [value.copy() for value in courses[0].centre]
    for task, step in ((0, 5), (1, 12)):
        courses[task].begin_anew(Progress(10 + 20 * task, step))
    made.side_by_side(lambda task: courses[task].take(0, Progress(20 + 10 * task, 20), 0.1, centre), range(2))
    assert_alike(courses)
    assert_values(courses[0].centre, [value + delta / 2 for value, delta in zip(centre, change(1, 3), strict=True)])


def test_fit_is_over_after_another_task_ended_it(job):
    made = job(2)
    courses = joined(made, [0, 1])
    made.members[1].fit = 0
    made.running_at_once = True
    take(courses, 0, 1, 10)
    made.members[0].reach(1, 0)
    _, new = take(courses, 1, 1, 10)
    assert courses[1].is_over
    assert_values(new, courses[0].centre)
    assert_values(courses[1].settle(Progress(20, 10), trained(courses[1], 1, 2)).values, courses[0].centre)


def test_task_with_different_values_takes_values_of_others(job, caplog):
    """The others wait for it, and get what it has learned."""
    made = job(3)
    courses = joined(made, [0, 1, 2])
    courses[1].assigned(0, START[0] + 5, Progress(0, 0))

    def one_round(task):
        if task == 1:
            turn, values = take(courses, task, 0, 4)
            assert turn.left == 3
            assert_values(values, [w + d for w, d in zip(START, change(1, 0), strict=True)])
        return take(courses, task, 1, 10)

    made.side_by_side(one_round, range(3))
    assert_alike(courses)
    assert "task 1 has other values of optimizer 0" in caplog.text
    assert [courses[task].round for task in range(3)] == [1, 1, 1]
    means = [np.mean(changes, axis=0) for changes in zip(*(change(task, 1) for task in range(3)), strict=True)]
    assert_values(courses[0].centre, [w + mean for w, mean in zip(START, means, strict=True)])


def test_layer_state_does_not_wait_for_quorum(job):
    """Some may have come to the end of an epoch before others, which wait for them in another round."""
    made = job(2, quorum=2)
    courses = joined(made, [0, 1], are_weights=False)
    made.running_at_once = True
    assert courses[0].settle(Progress(10, 5), trained(courses[0], 0, 1)).changes
    assert courses[0].round == 1


def test_other_tasks_follow_replaced_values(job):
    made = job(2)
    courses = joined(made, [0, 1])
    assert not courses[1].follow(0.0)
    courses[0].assigned(0, START[0] + 5, Progress(0, 0))
    courses[0].replace()
    assert courses[1].follow(30.0)
    assert_values(courses[1].centre, [START[0] + 5, START[1]])
    assert_alike(courses)
    assert courses[0].round == courses[1].round == 1
    np.testing.assert_array_equal(courses[1].joined.state, [np.full(2, 7.0)])
    for rounds in courses.values():
        rounds.begin_anew(Progress(0, 0))
    made.side_by_side(lambda task: take(courses, task, 1, 10), range(2))
    assert_alike(courses)
    assert courses[0].round == 2


def test_assigned_values_become_the_new_centre(job):
    made = job(2)
    courses = joined(made, [0, 1])
    for rounds in courses.values():
        rounds.assigned(1, np.full(4, 9.0), Progress(0, 0))
    made.side_by_side(lambda task: take(courses, task, 1, 10), range(2))
    np.testing.assert_allclose(courses[1].centre[1], 9 + (change(0, 1)[1] + change(1, 1)[1]) / 2)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"settings": "others"}, RendezvousError, "the others have .* alike, 2 variables"),
        ({"start": [np.zeros(3)]}, RendezvousError, "Give every task the same arguments and the same model"),
    ],
)
def test_other_settings_or_models_are_refused(job, arguments, error, match):
    made = job(2)
    first = course(made.members[0])
    with pytest.raises(error, match=match):
        course(made.members[1], **arguments)
    with pytest.raises(MismatchError, match="task 0 has other variables"):
        first._check([np.zeros(3)], 0)


def test_missing_state_raises_and_names_address_of_source(job):
    made = job(2)
    first = course(made.members[0])
    made.members[1].patience = 0.0
    made.members[1].fetch = lambda source, address, rounds: None
    with pytest.raises(
        RendezvousError, match=r"task 0 has the state of .* of round 0, but did not send it from 127\.0\.0\.1:"
    ):
        course(made.members[1])
    assert first.round == 0


def test_a_process_alone_makes_rounds_by_itself():
    alone = QuorumRoundsFactory(SingleProcessMembers(), Every(5), Averaging, None, "").of(
        VariableGroup(NAME, ["a", "b"], list(START), 0.1, Training())
    )
    assert alone.joined is None
    assert alone.begin_anew(Progress(0, 0)).left == 5
    for number in range(1, 3):
        turn, new = alone.take(0, Progress(10 * number, 5 * number), 0.1, trained(alone, 0, number))
        assert turn.left == 5
    assert_values(new, [w + a + b for w, a, b in zip(START, change(0, 1), change(0, 2), strict=True)])


def test_task_joining_at_epoch_begin_takes_rates_before_callbacks(job):
    """Also if these set a rate while the state is read that it takes over."""
    made = job(2, quorum=1)

    class Beginning(Training):
        rate = 0.1

        def state(self):
            if first._rates.epoch < 0:
                first.begin_epoch(0)
                self.rate *= 0.5  # as a callback does
            return [np.full(2, self.rate)]

        def rates(self):
            return [self.rate]

    first = course(made.members[0], live=Beginning())
    late = course(made.members[1], [value + 1 for value in START])
    assert late.joined.state[0].tolist() == [0.05] * 2
    assert late.joined.rates == (0.1,)
