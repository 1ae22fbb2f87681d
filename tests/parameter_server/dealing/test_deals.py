"""What is answered to workers that ask for batches, without sockets."""

import json

import numpy as np
import pytest

from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.protocol.dealing import (
    BeginEpoch,
    BringBatch,
    DealtBatch,
    EpochPlanned,
    LeaveEpoch,
    NoBatch,
    SkipBatch,
    TakeBatch,
)
from tfdist.parameter_server.protocol.messages import Done, Refused, Waiting


class Talk:
    """A dealer, and what it answers."""

    def __init__(self, workers=2, samples=10, batch_size=4):
        self.deals = DealerService()
        self.idle, self.left = [], []
        self.deals.when_idle_changes = self.idle.append
        self.deals.when_left = self.left.append
        self.parts, self.arrays = [], ()
        self.number = 0
        self.requests = dict.fromkeys(range(9), 0)
        for worker in range(workers):
            self.begin(worker, samples=samples, batch_size=batch_size)

    def say(self, kind, *fields):
        """Returns the list of answers, to which others may come."""
        self.number += 1
        kept = []
        self.deals.heard(
            kind(self.number, *fields), self.parts, lambda message, arrays: self.keep(kept, message, arrays)
        )
        return kept

    def keep(self, kept, message, arrays):
        kept.append(message)
        if isinstance(message, DealtBatch):
            self.arrays = arrays

    def begin(self, worker, epoch=0, incarnation=1, fit=0, samples=10, batch_size=4, seed=7):
        return self.say(BeginEpoch, worker, incarnation, fit, epoch, samples, batch_size, seed)[-1]

    def take(self, worker, epoch=0, incarnation=1, is_idle=False, again=False):
        self.requests[worker] += not again
        return self.say(TakeBatch, worker, incarnation, 0, epoch, self.requests[worker], is_idle)

    def batch(self, worker, **options):
        (answer,) = self.take(worker, **options)
        assert isinstance(answer, DealtBatch), answer
        return answer

    def commit(self, worker, batch):
        assert self.deals.may_commit(worker, batch.ticket)
        self.deals.commit(worker, batch.ticket)


def test_batches_are_dealt_and_the_epoch_ends():
    talk = Talk(workers=1)
    batches = []
    for _ in range(3):
        batches.append(talk.batch(0))
        talk.commit(0, batches[-1])
    assert [(batch.start, batch.stop) for batch in batches] == [(0, 4), (4, 8), (8, 10)]
    assert talk.take(0)[-1].is_over


def test_first_workers_plan_applies_to_the_epoch():
    talk = Talk(workers=1)
    assert talk.begin(1, seed=8).seed == 7
    assert isinstance(talk.begin(1, samples=11), Refused)
    assert isinstance(talk.begin(1, epoch=1, seed=9), EpochPlanned)


def test_a_request_that_comes_again_gets_the_same_batch():
    talk = Talk()
    first = talk.batch(0)
    assert talk.batch(0, again=True).ticket == first.ticket
    assert talk.batch(1).start == 4


def test_worker_without_a_batch_is_notified_once_and_waits():
    talk = Talk(samples=4)
    batch = talk.batch(0)
    assert [type(message) for message in talk.take(1)] == [NoBatch]
    assert talk.idle == [{1}]
    waiting = talk.take(1, is_idle=True)
    assert [type(message) for message in waiting] == [Waiting]
    talk.deals.give_back(0, batch.ticket)
    assert isinstance(waiting[-1], DealtBatch)
    assert talk.idle == [{1}, set()]


def test_worker_with_a_batch_waits_without_notification():
    talk = Talk(samples=8)
    talk.batch(0)
    other = talk.batch(1)
    waiting = talk.take(1)
    assert [type(message) for message in waiting] == [Waiting]
    talk.commit(1, other)
    assert waiting[-1] == NoBatch(waiting[0].id, is_over=False), "now it has none"


def test_waiting_worker_is_told_that_the_epoch_is_over():
    talk = Talk(samples=4)
    batch = talk.batch(0)
    talk.take(1)
    waiting = talk.take(1, is_idle=True)
    talk.commit(0, batch)
    assert waiting[-1].is_over
    assert talk.deals.idle == {1}, "until it has begun another epoch"
    talk.begin(1, epoch=1)
    assert talk.deals.idle == set()


def test_a_lost_workers_batches_are_dealt_again():
    talk = Talk(samples=4)
    batch = talk.batch(0)
    talk.take(1)
    waiting = talk.take(1, is_idle=True)
    talk.deals.lost(0)
    assert isinstance(waiting[-1], DealtBatch)
    assert not talk.deals.may_commit(0, batch.ticket)
    assert talk.take(0)[-1].is_unknown, "it has to begin again"
    planned = talk.begin(0, samples=4)
    assert planned == EpochPlanned(talk.number, 7)


def test_new_process_of_a_worker_loses_the_old_batches():
    talk = Talk(samples=4)
    batch = talk.batch(0)
    talk.begin(0, incarnation=2, samples=4)
    assert not talk.deals.may_commit(0, batch.ticket)
    assert talk.take(0)[-1].is_unknown
    assert talk.batch(0, incarnation=2).start == 0


def test_batches_of_a_leaving_worker_are_dealt_again():
    talk = Talk(samples=8)
    talk.batch(0)
    talk.batch(0)
    talk.take(1)
    waiting = talk.take(1, is_idle=True)
    late = talk.take(0)
    assert isinstance(talk.say(LeaveEpoch, 0, 1)[-1], Done)
    assert late[-1].is_over, "its thread that reads batches ends"
    assert isinstance(waiting[-1], DealtBatch)
    assert talk.left == [0]
    assert isinstance(talk.say(LeaveEpoch, 0, 1)[-1], Done), "again"
    assert talk.left == [0]


def test_skipped_batch_counts_as_committed():
    talk = Talk(workers=1, samples=4)
    ticket = talk.batch(0).ticket
    for _ in range(2):
        assert isinstance(talk.say(SkipBatch, 0, 1, ticket)[-1], Done)
    assert talk.deals.is_committed(0, ticket)
    assert talk.take(0)[-1].is_over


def test_a_late_copy_does_not_replace_a_request_that_waits():
    talk = Talk(workers=2, samples=8)
    first = talk.batch(0)
    talk.batch(1)
    waiting = talk.take(0)
    assert talk.say(TakeBatch, 0, 1, 0, 0, talk.requests[0] - 1) == []
    talk.deals.give_back(0, first.ticket)
    assert isinstance(waiting[-1], DealtBatch)


def test_restored_server_deals_uncommitted_batches_again():
    """One of three batches is applied, one waits for others, and one is out: the last two are dealt again."""
    talk = Talk()
    applied, waits, _ = talk.batch(0), talk.batch(1), talk.batch(0)
    talk.commit(0, applied)
    talk.commit(1, waits)
    state = json.loads(json.dumps(talk.deals.state([(1, waits.ticket)])))
    again = Talk(workers=0)
    again.deals.restore(state)
    assert again.deals.is_committed(0, applied.ticket)
    assert not again.deals.is_committed(1, waits.ticket), "its push is refused, and its batch dealt to somebody"
    assert not again.deals.may_commit(1, waits.ticket)
    assert again.take(0)[-1].is_unknown, "it has to begin again"
    again.begin(0)
    starts = []
    for _ in range(2):
        batch = again.batch(0)
        starts.append(batch.start)
        again.commit(0, batch)
    assert sorted(starts) == [4, 8]
    (answer,) = again.take(0)
    assert answer.is_over


def test_state_of_another_job_is_ignored():
    talk = Talk(workers=1)
    for _ in range(3):
        talk.commit(0, talk.batch(0))
    other = DealerService(job="another")
    other.restore(talk.deals.state([]))
    other.restore(None)
    talk.deals = other
    talk.begin(0)
    assert talk.batch(0).start == 0


class Streaming(Talk):
    """Worker 0 brings the batches, each of which is one array with its number."""

    def __init__(self, workers=2):
        super().__init__(workers=0)
        for worker in range(workers):
            self.begin_stream(worker)

    def begin_stream(self, worker, epoch=0, incarnation=1, fit=0):
        (answer,) = self.say(BeginEpoch, worker, incarnation, fit, epoch, None, 1, None, False, worker == 0)
        return answer

    def bring(self, number, epoch=0, **options):
        self.parts = [] if options else [np.array([number])]
        answers = self.say(BringBatch, 0, 1, 0, epoch, number, *options.values())
        self.parts = []
        return answers

    def content(self, worker):
        batch = self.batch(worker)
        return batch, int(self.arrays[0][0])


def test_a_stream_is_asked_for_more_when_there_is_room():
    talk = Streaming(workers=1)
    assert [message.wanted for message in talk.bring(0)] == [1]
    waiting = talk.bring(1)
    assert [type(message) for message in waiting] == [Waiting]
    batch, number = talk.content(0)
    assert number == 0
    assert waiting[-1].wanted == 2
    talk.commit(0, batch)
    ended = talk.bring(2, is_end=True)
    assert ended[-1].wanted is None
    talk.commit(0, talk.batch(0))
    assert talk.take(0)[-1].is_over


def test_waiting_worker_gets_the_next_batch_of_a_stream():
    talk = Streaming()
    waiting = talk.take(1)
    assert [(type(message), message.awaited) for message in waiting] == [(Waiting, (0,))]
    talk.bring(0)
    assert isinstance(waiting[-1], Waiting), "the chief may need it"
    talk.bring(1)
    assert isinstance(waiting[-1], DealtBatch)
    assert not talk.idle


def test_restarted_stream_continues_after_the_received_batches():
    talk = Streaming()
    for number in range(2):
        talk.bring(number)
    talk.deals.lost(0)
    talk.begin_stream(0)
    assert talk.bring(0)[-1].wanted == 2
    assert [talk.content(1)[1] for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("how", ["it leaves", "it goes on to the next epoch"])
def test_stream_ends_when_its_worker_leaves_the_epoch(how):
    talk = Streaming()
    (answer,) = talk.bring(0)
    assert answer.wanted == 1
    waiting = talk.bring(1)
    full = talk.bring(2)
    assert [type(message) for message in full] == [Waiting]
    if how == "it leaves":
        talk.say(LeaveEpoch, 0, 1)
    else:
        talk.begin_stream(0, epoch=1)
    assert full[-1].wanted is None
    assert waiting[-1].wanted == 2
    for _ in range(3):
        talk.commit(1, talk.batch(1))
    assert talk.take(1)[-1].is_over
    if how == "it leaves":  # and brings no later one
        talk.begin_stream(1, epoch=1)
        assert talk.take(1, epoch=1)[-1].is_over


def test_stream_failure_is_sent_to_all_workers():
    talk = Streaming()
    waiting = talk.take(1)
    talk.bring(0, is_end=True, failure="no such file")
    for answers in (waiting, talk.take(0)):
        assert isinstance(answers[-1], Refused)
        assert answers[-1].why == "no such file"
        assert not answers[-1].is_unknown
