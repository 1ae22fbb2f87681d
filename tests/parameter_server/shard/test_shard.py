"""What messages do to a shard, without sockets."""

import functools
import threading

import keras
import numpy as np
import pytest

from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.staleness import DelayCompensated, DropBeyond, Unscaled
from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.protocol.dealing import BeginEpoch, DealtBatch, TakeBatch
from tfdist.parameter_server.protocol.messages import (
    AssignValues,
    Attach,
    Attached,
    CreateShard,
    Decision,
    Done,
    LeaveModel,
    Pull,
    Push,
    Refused,
    Suspend,
    Values,
    Waiting,
)
from tfdist.parameter_server.protocol.state import HeldRows, ShardProgress, TrainingState
from tfdist.parameter_server.shard.feature import ShardFeature
from tfdist.parameter_server.shard.features import features_of
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard
from tfdist.parameter_server.snapshots import sharded
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.snapshots.sharded import ShardState

HELD = (HeldRows("dense/kernel", 0, 4, 4), HeldRows("dense/bias", 0, 3, 3))
ZEROS = [np.zeros((4, 3), np.float32), np.zeros(3, np.float32)]
ONES = [np.ones(15, np.float32)]
"""A gradient: the vector of both variables."""


class Talk:
    """A shard, and what it answers; requests are numbered."""

    def __init__(self, mode=Asynchronous(), workers=1, optimizer=None, created=True, snapshots=None):  # noqa: B008
        self.shard = Shard(Ledger(mode), snapshots, features_of(Arguments(mode)))
        self.answers = {}
        self.number = 0
        for worker in range(workers):
            self.attach(worker)
        if created:
            self.create(optimizer or keras.optimizers.SGD(1.0))

    def say(self, kind, *fields, arrays=(), again=False):
        """Sends a message, under the last number if ``again``; returns its last answer, if there is one yet."""
        self.number += not again
        number, kept = self.number, self.answers.setdefault(self.number, [])
        self.shard.heard(kind(number, *fields), list(arrays), lambda *answer: kept.append(answer))
        return kept[-1][0] if kept else None

    def attach(self, worker, incarnation=1):
        return self.say(Attach, worker, incarnation, "model")

    def create(self, optimizer, arrays=ZEROS, worker=0):
        config = keras.saving.serialize_keras_object(optimizer)
        has_values = arrays is not None
        fields = (worker, 1, "model", HELD, config, has_values, ((), ()) if has_values else ())
        return self.say(CreateShard, *fields, arrays=arrays or ())

    def push(
        self,
        worker=0,
        clock=0,
        sequence=None,
        arrays=ONES,
        kinds=(),
        incarnation=1,
        samples=1.0,
        again=False,
        **options,
    ):
        read = self.shard.ledger.version
        sequence = clock if sequence is None else sequence
        message = functools.partial(Push, **options)
        return self.say(message, worker, incarnation, sequence, clock, read, samples, kinds, arrays=arrays, again=again)

    def pull(self, worker=0, incarnation=1, what="values"):
        return self.say(Pull, worker, incarnation, what)

    @property
    def kernel(self):
        return self.shard.store.vectors()[0][:12].reshape(4, 3)

    @property
    def bias(self):
        return float(self.shard.store.vectors()[0][-1])


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


def test_answers_to_pushes_do_not_change():
    talk = Talk()
    talk.push()
    _, (values,) = talk.answers[3][0]
    talk.push(clock=1)
    np.testing.assert_array_equal(values, -ONES[0], "later updates do not change what was answered")


def test_put_replaces_the_values():
    talk = Talk()
    talk.push()
    assert isinstance(talk.say(AssignValues, 0, 1, arrays=[np.full(15, 7, np.float32)]), Done)
    assert talk.bias == 7
    assert "expected" in talk.say(AssignValues, 0, 1, arrays=[np.ones(3, np.float32)]).why
    assert talk.say(AssignValues, 0, 2, arrays=ONES).is_unknown


def test_pull_returns_state_and_averages():
    talk = Talk(optimizer=keras.optimizers.SGD(1.0, momentum=0.5, use_ema=True, ema_momentum=0.5))
    for clock in range(2):
        talk.push(clock=clock)
    answer = talk.pull(what="state")
    state = TrainingState.of_arrays(talk.answers[talk.number][0][1], 2, answer.slots, answer.scalars)
    np.testing.assert_array_equal(state.values[0], np.full((4, 3), -2.5))
    np.testing.assert_array_equal(state.slots[0]["momentum"], np.full((4, 3), -1.5))
    np.testing.assert_array_equal(state.slots[1]["average"], np.full(3, -1.75))
    assert int(state.scalars["iteration"]) == 2
    talk.pull(what="averages")
    np.testing.assert_array_equal(talk.answers[talk.number][0][1][0], np.full(15, -1.75))


def test_after_fit_values_are_averages_unless_something_is_assigned():
    talk = Talk(optimizer=keras.optimizers.SGD(1.0, momentum=0.5, use_ema=True, ema_momentum=0.5))

    def final():
        talk.pull(what="final")
        return talk.answers[talk.number][0][1][0]

    for clock in range(2):
        talk.push(clock=clock)
    np.testing.assert_array_equal(final(), np.full(15, -1.75))
    talk.shard.heard(AssignValues(99, 0, 1), [np.full(15, 3.0, np.float32)], lambda *answer: None)
    np.testing.assert_array_equal(final(), np.full(15, 3.0))
    talk.push(clock=2)
    assert not np.any(final() == 3.0), "averages again"


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


@pytest.mark.parametrize(("late", "reads"), [(Unscaled(), 0), (DelayCompensated(1.0), 4)], ids=str)
def test_whole_parameters_are_copied_only_for_parts_that_read_them(late, reads, monkeypatch):
    talk = Talk(Asynchronous(late), workers=2)
    talk.shard.features = [*talk.shard.features, ShardFeature()]
    vectors, copies = talk.shard.store.vectors, []
    monkeypatch.setattr(talk.shard.store, "vectors", lambda *kinds: copies.append(kinds) or vectors(*kinds))
    talk.pull(1)
    talk.push(0)
    talk.shard.heard(Push(90, 1, 1, 0, 0, 0, 1.0), ONES, lambda *answer: None)
    assert talk.shard.ledger.staleness[1] == 1
    assert copies.count(()) == reads


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


def shot(folder, mode=Asynchronous(), created=False, workers=1):  # noqa: B008
    return Talk(mode, workers, created=created, snapshots=Snapshots(folder, 0, 1, 60.0))


def test_a_server_goes_on_from_its_snapshot(tmp_path):
    """Any worker may describe the model. What had not been applied is not known as counted."""
    first = shot(tmp_path, SoftSync(1), created=True, workers=2)
    for worker, clock in ((0, 0), (1, 0), (0, 1)):
        first.push(worker, clock)
    first.shard.close()
    again = shot(tmp_path, SoftSync(1), workers=2)
    again.create(keras.optimizers.SGD(1.0), arrays=None, worker=1)
    assert again.bias == -1
    assert again.shard.ledger.version == 1
    again.push(1, 0)
    assert again.bias == -1, "the snapshot has it"
    again.push(0, 1)
    again.push(1, 1)
    assert again.bias == -2


def test_pushes_are_counted_once_over_a_restart(tmp_path):
    """Workers push again what was counted and is not in the snapshot, as it waited for an update."""
    first = shot(tmp_path, SoftSync(1), created=True, workers=2)
    for worker, clock in ((0, 0), (1, 0), (0, 1)):
        first.push(worker, clock)
    assert first.shard.ledger.counted == {0: 2, 1: 1}
    first.shard.close()
    again = shot(tmp_path, SoftSync(1), workers=2)
    nonsense = {"class_name": "NoSuch", "config": {}}
    assert "cannot be made" in again.say(CreateShard, 0, 1, "model", HELD, nonsense, False).why
    again.create(keras.optimizers.SGD(1.0), arrays=None)
    assert again.shard.ledger.counted == {0: 1, 1: 1}
    for worker, clock in ((0, 0), (1, 0), (0, 1)):
        again.push(worker, clock)
    counted = {worker_report.number: worker_report.counted for worker_report in again.shard.report("model", 0).workers}
    assert counted == {0: 2, 1: 1}


def test_last_snapshot_includes_updates_during_another_write(tmp_path, monkeypatch):
    write, may_go_on = sharded.write, threading.Event()

    def slow(*arguments):
        assert may_go_on.wait(60)
        return write(*arguments)

    monkeypatch.setattr(sharded, "write", slow)
    first = shot(tmp_path, created=True)  # the first values are being written
    first.push(0, 0)
    threading.Timer(0.1, may_go_on.set).start()
    first.shard.close()
    again = shot(tmp_path)
    again.create(keras.optimizers.SGD(1.0))
    assert again.shard.ledger.version == 1


def test_put_values_are_in_the_next_snapshot(tmp_path):
    first = shot(tmp_path, created=True)
    first.shard.snapshots.wait()
    first.say(AssignValues, 0, 1, arrays=[np.full(15, 5.0, np.float32)])
    first.shard.close()
    again = shot(tmp_path)
    again.create(keras.optimizers.SGD(1.0))
    assert again.bias == 5


def test_values_after_fit_are_what_was_assigned_before_a_restart(tmp_path):
    average = keras.optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5)
    first = Talk(optimizer=average, snapshots=Snapshots(tmp_path, 0, 1, 60.0))
    first.shard.snapshots.wait()
    first.push()
    first.say(AssignValues, 0, 1, arrays=[np.full(15, 3.0, np.float32)])
    first.shard.close()
    again = shot(tmp_path)
    again.create(average, arrays=None)
    again.pull(what="final")
    np.testing.assert_array_equal(again.answers[again.number][0][1][0], np.full(15, 3.0))


def test_the_first_snapshot_is_of_the_first_values(tmp_path):
    first = shot(tmp_path, created=True)
    first.shard.snapshots.wait()
    again = shot(tmp_path)
    again.create(keras.optimizers.SGD(1.0), arrays=[zeros + 5 for zeros in ZEROS])
    assert again.bias == 0, "what the chief has counts for nothing then"


def test_snapshot_of_another_model_is_refused(tmp_path):
    first = shot(tmp_path, created=True)
    first.shard.snapshots.wait()
    state = ShardState("other", {}, {}, (), ShardProgress(3))
    sharded.write(tmp_path, 0, 1, state)
    refused = shot(tmp_path, created=False).create(keras.optimizers.SGD(1.0))
    assert "are of another model" in refused.why


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


class Dealing(Talk):
    """A shard whose workers are dealt one batch after the other."""

    def __init__(self, mode=Asynchronous(), workers=1, batches=9, **options):  # noqa: B008
        super().__init__(mode, workers, **options)
        self.deals = self.shard.tickets.deals = DealerService()
        self.deals.when_idle_changes = self.shard.set_idle
        for worker in range(workers):
            self.deals.heard(BeginEpoch(0, worker, 1, 0, 0, batches, 1, None), [], lambda message, arrays: None)
        self.requests = 0

    def take(self, worker=0):
        self.requests += 1
        answers = []
        self.deals.heard(
            TakeBatch(0, worker, 1, 0, 0, self.requests), [], lambda message, arrays: answers.append(message)
        )
        return answers[-1].ticket if isinstance(answers[-1], DealtBatch) else answers[-1]


def test_a_push_commits_its_batch_once():
    talk = Dealing()
    ticket = talk.take()
    answer = talk.push(dealt=ticket)
    assert (answer.is_refused, answer.decision) == (False, Decision(1, 1.0))
    assert talk.deals.is_committed(0, ticket)
    again = talk.push(dealt=ticket, again=True)
    assert (again.is_refused, again.decision, talk.bias) == (False, Decision(1, 1.0), -1)


def test_push_of_another_workers_batch_is_not_applied():
    talk = Dealing()
    ticket = talk.take()
    talk.deals.lost(0)
    for again in (False, True):
        answer = talk.push(dealt=ticket, again=again)
        assert (answer.is_refused, answer.version, talk.bias) == (True, 0, 0)
    assert talk.push(clock=1).version == 1, "the worker goes on"


def test_the_batch_of_a_push_that_is_too_late_is_dealt_again():
    talk = Dealing(Asynchronous(DropBeyond(0)), batches=1)
    talk.push()
    ticket = talk.take()
    stale = Push(90, 0, 1, 5, 1, 0, 1.0, dealt=ticket)
    answers = []
    talk.shard.heard(stale, ONES, lambda message, arrays: answers.append(message))
    assert answers[-1].is_refused
    assert talk.bias == -1
    assert talk.take() != ticket, "the same batch, with another ticket"


def test_decision_lists_the_workers_of_a_round():
    talk = Dealing(Synchronous(), workers=3, batches=2)
    tickets = [talk.take(0), talk.take(1)]
    assert talk.take(2).is_over is False
    talk.push(0, dealt=tickets[0])
    first = talk.number
    answer = talk.push(1, dealt=tickets[1])
    assert answer.decision == Decision(1, 1.0, (0, 0), (0, 1))
    assert talk.answers[first][-1][0].decision == answer.decision


def test_another_servers_decision_is_followed():
    talk = Talk(Synchronous(), workers=3)
    decision = Decision(1, 0.5, (0, 0), (0, 1))
    assert isinstance(talk.push(0, dealt=decision), Waiting)
    assert talk.push(1, dealt=decision).version == 1
    assert talk.bias == -0.5
