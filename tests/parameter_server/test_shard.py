"""What messages do to a shard, without sockets."""

import re

import keras
import numpy as np
import pytest

from tfdist.parameter_server.ledger import Ledger
from tfdist.parameter_server.messages import (
    Attach,
    Attached,
    Create,
    Done,
    Held,
    Leave,
    Pull,
    Push,
    Refused,
    SetLearningRate,
    Values,
    Waiting,
)
from tfdist.parameter_server.shard import Shard
from tfdist.parameter_server.staleness import AsItIs
from tfdist.parameter_server.synchronization import Asynchronous, BoundedStaleness, Synchronous

HELD = (Held("dense/kernel", 0, 4), Held("dense/bias", 0, 3))
ZEROS = [np.zeros((4, 3), np.float32), np.zeros(3, np.float32)]
ONES = [np.ones_like(value) for value in ZEROS]


class Talk:
    """A shard, and what it answers; requests are numbered."""

    def __init__(self, mode=Asynchronous(), workers=1, optimizer=None, created=True):  # noqa: B008
        self.shard = Shard(Ledger(mode, AsItIs()))
        self.answers = {}
        self.number = 0
        for worker in range(workers):
            self.attach(worker)
        if created:
            self.create(optimizer or keras.optimizers.SGD(1.0))

    def say(self, kind, *fields, arrays=()):
        """Sends a message; returns its number and, if there is one yet, its last answer."""
        self.number += 1
        number, kept = self.number, self.answers.setdefault(self.number, [])
        self.shard.heard(kind(number, *fields), list(arrays), lambda *answer: kept.append(answer))
        return kept[-1][0] if kept else None

    def attach(self, worker, incarnation=1, digest="model"):
        return self.say(Attach, worker, incarnation, digest)

    def create(self, optimizer, digest="model", arrays=ZEROS):
        return self.say(Create, digest, HELD, keras.optimizers.serialize(optimizer), arrays=arrays)

    def push(self, worker=0, clock=0, sequence=None, arrays=ONES, kinds=("dense", "dense"), incarnation=1, samples=1.0):
        read = self.shard.ledger.version
        sequence = clock if sequence is None else sequence
        return self.say(Push, worker, incarnation, sequence, clock, read, samples, kinds, arrays=arrays)

    def pull(self, worker=0, clock=0, incarnation=1):
        return self.say(Pull, worker, incarnation, clock)

    @property
    def bias(self):
        return float(self.shard.store.values()[1][0])


def test_a_worker_enters_once():
    talk = Talk(created=False, workers=0)
    assert talk.attach(3) == Attached(1, clock=0, is_created=False)
    talk.create(keras.optimizers.SGD(1.0))
    assert talk.attach(3) == Attached(3, clock=0, is_created=True)
    talk.push(3)
    assert talk.attach(3).clock == 1, "sent again, it changes nothing"
    assert talk.attach(3, incarnation=2).clock == 0, "another process begins anew"


def test_gradients_are_applied():
    talk = Talk()
    assert talk.push() == Done(3, version=1)
    assert talk.bias == -1
    assert talk.pull() == Values(4, version=1, iterations=1)
    _, values = talk.answers[4][0]
    np.testing.assert_array_equal(values[0], -ONES[0])


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


def test_the_first_model_counts():
    talk = Talk()
    talk.push()
    assert isinstance(talk.create(keras.optimizers.SGD(5.0), arrays=ONES), Done)
    assert talk.bias == -1


def test_pulls_wait_for_the_model():
    talk = Talk(created=False)
    assert isinstance(talk.pull(), Waiting)
    talk.create(keras.optimizers.SGD(1.0))
    assert [type(answer) for answer, _ in talk.answers[2]] == [Waiting, Values]


def test_pulls_wait_for_the_slowest():
    talk = Talk(BoundedStaleness(1), workers=2)
    talk.push(0, 0)
    assert isinstance(talk.pull(0, 1), Values)
    talk.push(0, 1)
    assert isinstance(talk.pull(0, 2), Waiting)
    number = talk.number
    talk.push(1, 0)
    assert isinstance(talk.answers[number][-1][0], Values)


def test_a_pull_that_comes_again_is_answered_once():
    talk = Talk(BoundedStaleness(0), workers=2)
    talk.push(0, 0)
    for _ in range(3):
        assert isinstance(talk.pull(0, 1), Waiting)
    talk.push(1, 0)
    given = [answer for answers in talk.answers.values() for answer, _ in answers if isinstance(answer, Values)]
    assert len(given) == 1


def test_nobody_waits_for_a_worker_that_is_lost():
    talk = Talk(BoundedStaleness(0), workers=2)
    talk.push(0, 0)
    talk.pull(0, 1)
    number = talk.number
    talk.shard.lost(1)
    assert isinstance(talk.answers[number][-1][0], Values)
    talk.shard.lost(7)  # who never came


def test_a_step_of_all_is_completed_by_a_death():
    talk = Talk(Synchronous(), workers=3)
    talk.push(0, samples=3.0)
    talk.push(1, arrays=[5 * one for one in ONES], samples=1.0)
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
    assert isinstance(talk.push(incarnation=2), Done)


def test_a_worker_that_leaves():
    talk = Talk(BoundedStaleness(0), workers=2)
    talk.push(0, 0)
    assert isinstance(talk.say(Leave, 1, 1), Done)
    assert isinstance(talk.pull(0, 1), Values)


def test_the_learning_rate_is_the_chiefs():
    talk = Talk()
    assert isinstance(talk.say(SetLearningRate, 0.5), Done)
    talk.push()
    assert talk.bias == -0.5
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    assert "LearningRateSchedule" in Talk(optimizer=keras.optimizers.SGD(schedule)).say(SetLearningRate, 0.5).why


@pytest.mark.parametrize(
    ("arrays", "kinds", "words"),
    [
        (ONES[:1], ("dense", "dense"), "1 arrays are too few"),
        (ONES, ("dense", "none"), "2 arrays are too many"),
        (ONES, ("dense",), "1 gradients for 2 variables"),
        (ONES[::-1], ("dense", "dense"), r"a gradient of shape \(3,\) for a variable of shape \(4, 3\)"),
        ([np.ones((2, 3), np.float32), np.array([0, 4])], ("sparse", "none"), "rows from 0 to 4 of a variable of 4"),
        ([np.ones((2, 3), np.float32), np.array([-1, 0])], ("sparse", "none"), "rows from -1 to 0"),
        ([np.ones((1, 3), np.float32), np.array([0, 1])], ("sparse", "none"), r"a gradient of shape \(1, 3\)"),
    ],
)
def test_gradients_that_do_not_fit_change_nothing(arrays, kinds, words):
    talk = Talk()
    refused = talk.push(arrays=arrays, kinds=kinds)
    assert isinstance(refused, Refused)
    assert np.all(talk.shard.store.values()[0] == 0)
    assert re.search(words, refused.why)
    assert talk.push().version == 1, "the same push, as it should be"


def test_sparse_and_missing_gradients():
    talk = Talk()
    talk.push(arrays=[np.ones((2, 3), np.float32), np.array([1, 1])], kinds=("sparse", "none"))
    kernel, bias = talk.shard.store.values()
    np.testing.assert_array_equal(kernel[:, 0], [0, -2, 0, 0])
    np.testing.assert_array_equal(bias, ZEROS[1])


def test_another_model_is_refused():
    talk = Talk()
    for answer in (talk.attach(1, digest="other"), talk.create(keras.optimizers.SGD(1.0), digest="other")):
        assert "another model" in answer.why


def test_what_the_chief_sends_may_be_wrong():
    talk = Talk(created=False)
    assert "1 arrays for 2 variables" in talk.create(keras.optimizers.SGD(1.0), arrays=ZEROS[:1]).why
    refused = talk.say(Create, "model", HELD, {"class_name": "NoSuch", "config": {}}, arrays=ZEROS)
    assert "the optimizer cannot be made" in refused.why
    assert "has not given the model yet" in talk.push().why
    assert "has not given the model yet" in talk.say(SetLearningRate, 1.0).why
    assert isinstance(talk.create(keras.optimizers.SGD(1.0)), Done)
