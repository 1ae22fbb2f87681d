"""What messages do to a shard, without sockets."""

import keras
import numpy as np
import pytest

from tests.parameter_server.shard.talk import HELD, ONES, ZEROS, Talk
from tfdist.parameter_server.options.staleness import DelayCompensated
from tfdist.parameter_server.options.synchronization import Asynchronous, BoundedStaleness, Synchronous
from tfdist.parameter_server.protocol.messages import (
    AssignValues,
    Attached,
    CreateShard,
    Done,
    LeaveModel,
    Push,
    Refused,
    Suspend,
    Values,
    Waiting,
)


def test_repeated_attach_has_no_effect():
    talk = Talk(created=False, workers=0)
    assert talk.attach(3) == Attached(1, clock=0, is_created=False)
    talk.create(keras.optimizers.SGD(1.0), worker=3)
    assert talk.attach(3) == Attached(3, clock=0, is_created=True)
    talk.push(3)
    assert talk.attach(3).clock == 1, "sent again, it changes nothing"
    assert talk.attach(3, incarnation=2).clock == 0, "another process begins anew"


def test_gradients_are_applied():
    talk = Talk()
    assert_values(talk.push())
    assert talk.bias == -1
    assert_values(talk.pull())
    for number in (3, 4):
        _, values = talk.answers[number][0]
        np.testing.assert_array_equal(values[0], -ONES[0])


def assert_values(answer):
    assert isinstance(answer, Values)
    assert (answer.version, answer.iterations, answer.clock, answer.kinds) == (1, 1, 1, ())


def test_put_replaces_the_values():
    talk = Talk()
    talk.push()
    assert isinstance(talk.say(AssignValues, 0, 1, arrays=[np.full(15, 7, np.float32)]), Done)
    assert talk.bias == 7
    assert "expected" in talk.say(AssignValues, 0, 1, arrays=[np.ones(3, np.float32)]).why
    assert talk.say(AssignValues, 0, 2, arrays=ONES).is_unknown


def test_repeated_put_is_applied_once():
    """A worker sends a message again that a busy server has not answered: others' updates since must stay."""
    talk, answers = Talk(), []

    def put(number):
        value = np.full(15, 3.0, np.float32)
        talk.shard.heard(AssignValues(number, 0, 1), [value], lambda message, arrays: answers.append(message.id))

    put(98)
    talk.push(clock=0)
    assert talk.bias == 2.0
    put(98)
    assert talk.bias == 2.0
    put(99)
    assert talk.bias == 3.0
    assert answers == [98, 98, 99]


def test_late_gradients_are_corrected():
    """Worker 1 reads before worker 0 pushes; the correction is g + g² (w − w′)."""
    talk = Talk(Asynchronous(DelayCompensated(1.0)), workers=2)
    talk.pull(1)
    read = talk.shard.ledger.version
    talk.push(0, arrays=[np.full(15, 0.5, np.float32)])
    assert talk.bias == -0.5
    talk.number += 1
    push = Push(talk.number, 1, 1, 0, 0, read, 1.0)
    talk.shard.heard(push, [np.full(15, 0.25, np.float32)], lambda *answer: None)
    assert talk.bias == -0.5 - (0.25 - 0.25**2 * 0.5)


def test_a_push_that_comes_twice_counts_once():
    talk = Talk()
    for _ in range(3):
        assert talk.push(sequence=5).version == 1
    assert talk.bias == -1
    assert talk.shard.ledger.counted == {0: 1}


def test_an_older_push_that_comes_late_does_not_count_again():
    talk = Talk()
    talk.push(clock=0)
    talk.push(clock=1)
    talk.push(clock=0)
    assert talk.bias == -2


def test_second_create_message_is_ignored():
    talk = Talk()
    talk.push()
    assert isinstance(talk.create(keras.optimizers.SGD(5.0), arrays=ONES), Done)
    assert talk.bias == -1


def test_pulls_wait_for_the_model():
    talk = Talk(created=False)
    assert isinstance(talk.pull(), Waiting)
    talk.create(keras.optimizers.SGD(1.0))
    assert [type(answer) for answer, _ in talk.answers[2]] == [Waiting, Values]


def test_reads_wait_for_the_slowest():
    talk = Talk(BoundedStaleness(1), workers=2)
    talk.push(1, 0)
    assert isinstance(talk.push(0, 1), Values)
    assert isinstance(talk.push(0, 2), Waiting)
    number = talk.number
    assert isinstance(talk.pull(), Values), "but what evaluates does not"
    talk.push(1, 1)
    assert [type(answer) for answer, _ in talk.answers[number]] == [Waiting, Values]


def test_a_push_that_comes_again_is_answered_once():
    talk = Talk(BoundedStaleness(1), workers=2)
    talk.push(1, 0)
    talk.push(0, 0)
    for again in (False, True, True):
        assert isinstance(talk.push(0, 1, again=again), Waiting)
    number = talk.number
    talk.push(1, 1)
    given = [answer for answer, _ in talk.answers[number] if isinstance(answer, Values)]
    assert len(given) == 1
    assert talk.bias == -4


def test_the_end_of_fit_counts_once():
    """The message may come twice; the next call of `fit` ends, too."""
    talk = Talk(Synchronous(), workers=2)
    for again in (False, True):
        assert isinstance(talk.say(Suspend, 0, 1, True, again=again), Done)
    assert talk.shard.ledger.workers[0].round == (1, 0)
    talk.say(Suspend, 0, 1, True)
    assert talk.shard.ledger.workers[0].round == (2, 0)


@pytest.mark.parametrize("gone", [lambda talk: talk.shard.lost(1), lambda talk: talk.say(Suspend, 1, 1)])
def test_lost_or_suspended_worker_is_not_waited_for(gone):
    talk = Talk(BoundedStaleness(0), workers=2)
    talk.push(1, 0)
    talk.push(0, 0)
    talk.push(0, 1)
    number = talk.number
    gone(talk)
    assert isinstance(talk.answers[number][-1][0], Values)
    talk.shard.lost(7)  # who never came


def test_synchronous_step_is_completed_by_a_death():
    talk = Talk(Synchronous(), workers=3)
    talk.push(0, samples=3.0)
    talk.push(1, arrays=[5 * ONES[0]], samples=1.0)
    assert talk.bias == 0
    talk.shard.lost(2)
    assert talk.bias == -(3 * 1 + 1 * 5) / 4, "the mean by samples"


def test_a_worker_that_was_taken_for_lost_attaches_again():
    talk = Talk()
    talk.shard.lost(0)
    for answer in (talk.push(), talk.pull()):
        assert isinstance(answer, Refused)
        assert answer.is_unknown
    talk.attach(0, incarnation=2)
    assert isinstance(talk.push(incarnation=1), Refused), "the process before"
    assert isinstance(talk.push(incarnation=2), Values)


def test_repeated_push_of_a_lost_worker_counts_once():
    talk = Talk()
    talk.push(sequence=4)
    talk.shard.lost(0)
    talk.attach(0)
    talk.push(sequence=4)
    assert talk.bias == -1, "it could not know that its push had come"


def test_worker_that_left_is_not_waited_for():
    talk = Talk(BoundedStaleness(0), workers=2)
    talk.push(1, 0)
    assert isinstance(talk.say(LeaveModel, 1, 1), Done)
    assert isinstance(talk.push(0, 5), Values)


def test_the_learning_rate_is_the_chiefs():
    talk = Talk()
    talk.push(learning_rate=0.5)
    assert talk.bias == -0.5
    talk.push(clock=1)
    assert talk.bias == -1
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    assert "LearningRateSchedule" in Talk(optimizer=keras.optimizers.SGD(schedule)).push(learning_rate=0.5).why


def test_gradients_that_do_not_fit_change_nothing():
    talk = Talk()
    refused = talk.push(arrays=[np.ones(14, np.float32)])
    assert isinstance(refused, Refused)
    assert "(14,)" in refused.why
    assert talk.bias == 0
    assert talk.push().version == 1, "the same push, as it should be"


def test_sparse_and_missing_gradients_are_applied():
    talk = Talk()
    talk.push(arrays=[np.ones((2, 3), np.float32), np.array([1, 1])], kinds=("sparse", "none"))
    np.testing.assert_array_equal(talk.kernel[:, 0], [0, -2, 0, 0])
    assert talk.bias == 0


def test_waiting_pull_can_be_refused():
    talk = Talk(created=False, workers=2)
    assert talk.pull(1) == Waiting(3, (0,))
    talk.shard.refuse(1, "another model")
    assert talk.answers[3][-1][0] == Refused(3, "another model")
    assert isinstance(talk.create(keras.optimizers.SGD(1.0)), Done)


def test_a_worker_that_has_no_values_waits_for_the_chief():
    talk = Talk(created=False, workers=2)
    assert isinstance(talk.create(keras.optimizers.SGD(1.0), arrays=None, worker=1), Done)
    assert isinstance(talk.pull(1), Waiting)
    number = talk.number
    talk.create(keras.optimizers.SGD(1.0))
    assert isinstance(talk.answers[number][-1][0], Values)


def test_invalid_model_from_the_chief_is_refused():
    talk = Talk(created=False)
    assert "1 arrays for a state that has 2" in talk.create(keras.optimizers.SGD(1.0), arrays=ZEROS[:1]).why
    nonsense = {"class_name": "NoSuch", "config": {}}
    refused = talk.say(CreateShard, 0, 1, "model", HELD, nonsense, True, ((), ()), arrays=ZEROS)
    assert "the model cannot be made" in refused.why
    assert "with `tfdist serve --import MODULE`" in refused.why
    refused = talk.push()
    assert "has no model" in refused.why
    assert refused.is_unknown, "the worker attaches, and the chief gives it again"
    assert isinstance(talk.create(keras.optimizers.SGD(1.0)), Done)
