"""A leader's log, with a follower that the test plays, over a real socket."""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import zmq

from tfdist.parameter_server.protocol.line import Line
from tfdist.parameter_server.server import log as logs
from tfdist.parameter_server.server.log import ReplicationLog
from tfdist.parameter_server.server.replication_messages import (
    FROM_FOLLOWER,
    FROM_LEADER,
    Acknowledged,
    TaskArrived,
    WorkerLost,
)

DEADLINE = 20_000


class Other:
    """A follower: takes entries when it is told to."""

    def __init__(self, context):
        self.line, self.address = Line.listening(context, "127.0.0.1:0", None)
        self.peer = None

    def take(self):
        assert self.line.poll(DEADLINE / 1000)
        self.peer, frames = self.line.receive_from()
        return FROM_LEADER.decode(frames)

    def say(self, message):
        self.line.answer(self.peer, FROM_FOLLOWER.encode(message))


@pytest.fixture
def pair():
    """A log that has begun, its follower, and the first entry."""
    with contextlib.ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        other = Other(context)
        stack.callback(other.line.close)
        log = ReplicationLog()
        stack.callback(log.close)
        log.begin(other.address)
        yield log, other, other.take()[0]


def noted(log, other, stream, number):
    other.say(Acknowledged(stream, number))
    assert log.socket.poll(DEADLINE)
    log.attend()


def test_without_a_follower_answers_go_out_at_once():
    log, sent = ReplicationLog(), []
    log.hold(lambda: sent.append(1))
    log.append(WorkerLost, 1)
    assert sent == [1]
    assert log.seconds_left is None
    log.close()


def test_answers_wait_for_the_followers_acknowledgement(pair):
    log, other, begin = pair
    assert (begin.number, log.is_begun) == (0, False)
    sent = []
    for number in (1, 2):
        log.hold(lambda number=number: sent.append(number))
        log.append(WorkerLost, number, arrays=[np.full(2, number)])
    assert sent == []
    for number in (1, 2):
        entry, (array,) = other.take()
        assert entry == WorkerLost(begin.stream, number, number)
        assert array.tolist() == [number] * 2
    noted(log, other, begin.stream, 1)
    assert (sent, log.is_begun) == ([1], True)
    noted(log, other, begin.stream, 2)
    assert sent == [1, 2]
    assert log.seconds_left is None


def test_unacknowledged_entry_is_sent_again(pair, monkeypatch):
    log, other, begin = pair
    monkeypatch.setattr(logs, "_AGAIN_SECONDS", 0.0)
    noted(log, other, begin.stream, 0)
    log.append(TaskArrived, 1)
    log.attend()
    first, again = other.take(), other.take()
    assert first == again == (TaskArrived(begin.stream, 1, 1), [])


def test_acknowledgement_of_another_stream_is_ignored(pair):
    log, other, begin = pair
    noted(log, other, begin.stream + 1, 0)
    assert not log.is_begun


def test_losing_the_follower_releases_held_answers(pair):
    log, _, _ = pair
    sent = []
    log.hold(lambda: sent.append(1))
    log.append(WorkerLost, 1)
    log.hold(lambda: sent.append(2))
    log.end()
    assert sent == [1, 2]
    assert log.socket is None


def test_unacknowledged_entries_are_sent_again_despite_newer_entries(pair, monkeypatch):
    log, other, begin = pair
    noted(log, other, begin.stream, 0)
    now = [0.0]
    monkeypatch.setattr(logs, "time", SimpleNamespace(monotonic=lambda: now[0]))
    log.append(TaskArrived, 1)
    now[0] = 1.5
    log.append(TaskArrived, 2)
    assert log.seconds_left == 0.5
    now[0] = 2.0
    log.attend()
    assert [other.take()[0].number for _ in range(4)] == [1, 2, 1, 2]
