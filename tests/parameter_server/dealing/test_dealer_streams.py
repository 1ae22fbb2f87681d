"""The dealer of a stream: batches come one by one, and nobody knows how many."""

import json

import pytest

from tests.parameter_server.dealing.test_dealer import FIRST, place
from tfdist.parameter_server.dealing.dealer import Dealer
from tfdist.parameter_server.dealing.dealt_epoch import DealerError, EpochOver, WaitForBatch


def stream_of(workers):
    dealer = Dealer()
    for worker in range(workers):
        dealer.begin(worker, FIRST, None, 1, None)
    return dealer


def test_batches_of_a_stream_are_dealt_as_they_come():
    dealer = stream_of(2)
    assert dealer.take(0, FIRST) == WaitForBatch()
    dealer.bring(FIRST, 0, "first")
    first = dealer.take(0, FIRST)
    assert (place(first), first.content) == ((0, 1), "first")
    assert dealer.take(1, FIRST) == WaitForBatch()
    assert not dealer.idle, "others wait for who waits for the stream"
    dealer.end_stream(FIRST)
    assert dealer.take(1, FIRST) == WaitForBatch(), "the first batch may come back"
    assert dealer.idle == {1}
    dealer.commit(0, first.ticket)
    assert dealer.take(1, FIRST) == EpochOver()


def test_a_batch_of_a_stream_is_kept_until_it_is_committed():
    dealer = stream_of(2)
    dealer.bring(FIRST, 0, "first")
    dealer.take(0, FIRST)
    dealer.lost(0)
    again = dealer.take(1, FIRST)
    assert again.content == "first"
    dealer.commit(1, again.ticket)
    assert dealer.wanted(FIRST) == 1
    assert not dealer._epochs[FIRST].content


def test_repeated_and_early_stream_batches_are_ignored():
    dealer = stream_of(1)
    for number in (0, 0, 2, 1):
        dealer.bring(FIRST, number, number)
    assert dealer.wanted(FIRST) == 2
    assert [dealer.take(0, FIRST).content for _ in range(2)] == [0, 1]


def test_stream_has_room_for_one_batch_more_than_workers():
    dealer = stream_of(2)
    for number in range(3):
        assert dealer.has_room(FIRST)
        dealer.bring(FIRST, number, None)
    assert not dealer.has_room(FIRST)
    dealer.take(0, FIRST)
    assert dealer.has_room(FIRST)


def test_an_empty_stream_is_over():
    dealer = stream_of(1)
    dealer.end_stream(FIRST)
    assert dealer.wanted(FIRST) is None
    assert dealer.take(0, FIRST) == EpochOver()
    dealer.bring(FIRST, 0, "late")
    dealer.end_stream((9, 9))
    assert dealer.has_room(FIRST)


def test_mixing_stream_and_samples_raises():
    dealer = stream_of(1)
    with pytest.raises(DealerError, match="has samples 10, and the worker that began it has samples in a stream"):
        dealer.begin(1, FIRST, 10, 1, None)


def test_unfinished_stream_restarts_after_restoring_a_snapshot():
    dealer = stream_of(1)
    dealer.bring(FIRST, 0, "first")
    dealer.commit(0, dealer.take(0, FIRST).ticket)
    dealer.end_stream(FIRST)
    second = (0, 1)
    dealer.begin(0, second, None, 1, None)
    dealer.bring(second, 0, "lost")
    other = Dealer()
    other.restore(json.loads(json.dumps(dealer.state())))
    other.begin(0, FIRST, None, 1, None)
    assert other.take(0, FIRST) == EpochOver()
    other.begin(0, second, None, 1, None)
    assert other.wanted(second) == 0
    other.bring(second, 0, "again")
    assert other.take(0, second).content == "again"
