"""A follower does what its leader has done, in its order, and takes over when it has everything."""

import threading

import numpy as np
import pytest
import zmq

from tests.parameter_server.serving import DEADLINE
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.parameter_server.protocol.messages import FROM_WORKER, Attach
from tfdist.parameter_server.server.follower import Follower, ServerReplica
from tfdist.parameter_server.server.log import ReplicationLog
from tfdist.parameter_server.server.replication_messages import (
    FROM_LEADER,
    Acknowledged,
    BeginStream,
    StateComplete,
    TaskArrived,
    WorkerLost,
    WorkerMessage,
)
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard


def make():
    return Shards(lambda model, occurrence: Shard(Ledger(Asynchronous(), awaited={0, 1})))


def attach(worker=0):
    return [np.frombuffer(frame, np.uint8) for frame in FROM_WORKER.encode(Attach(1, worker, 1, "Adam-1"))]


def followed(*entries):
    """A replica after some entries."""
    replica = ServerReplica(make, 0)
    for entry in entries:
        replica.take(entry, attach() if isinstance(entry, WorkerMessage) else [])
    return replica


def test_entries_count_once_and_in_their_order():
    replica = followed(BeginStream(7, 0))
    assert replica.take(WorkerMessage(7, 2, b"peer"), attach()) == Acknowledged(7, 0), "one is missing"
    assert replica.shards.models() == []
    assert replica.take(WorkerLost(7, 1, 1), []) == Acknowledged(7, 1)
    assert replica.take(WorkerMessage(7, 2, b"peer"), attach()) == Acknowledged(7, 2)
    assert replica.take(TaskArrived(7, 3, 1), []) == Acknowledged(7, 3)
    assert replica.take(WorkerLost(7, 1, 1), []) == Acknowledged(7, 3), "a copy"
    (key,) = replica.shards.models()
    assert replica.shards[key].ledger.awaited == set(), "worker 1 was lost when the model was begun"
    assert replica.shards.absent == set()


def test_entries_of_others_are_ignored():
    replica = followed(BeginStream(7, 0))
    assert replica.take(WorkerLost(8, 1, 1), []) is None


def test_complete_follower_rejects_another_leader():
    replica = followed(BeginStream(7, 0), WorkerMessage(7, 1, b"peer"), StateComplete(7, 2))
    assert replica.is_whole
    assert replica.take(BeginStream(7, 0), []) == Acknowledged(7, 2), "a copy"
    assert replica.take(BeginStream(8, 0), []) is None
    assert replica.take(WorkerLost(7, 3, 1), []) == Acknowledged(7, 3)
    assert replica.shards.models()


def test_incomplete_follower_restarts_with_another_leader():
    replica = followed(BeginStream(7, 0), WorkerMessage(7, 1, b"peer"))
    replica.forget()
    assert replica.take(WorkerLost(7, 2, 0), []) is None
    assert replica.take(BeginStream(8, 0), []) == Acknowledged(8, 0)
    assert (replica.is_whole, replica.shards.models()) == (False, [])


class Running:
    """A follower on a thread, and the log of its leader."""

    def __init__(self):
        self.follower = Follower(make, 0, "127.0.0.1")
        self.found = []
        self.thread = threading.Thread(target=lambda: self.found.append(self.follower.run()), daemon=True)
        self.thread.start()
        self.log = ReplicationLog()

    def begin(self, log, done):
        log.begin(self.follower.address)
        while not done(log):
            assert log.socket.poll(1000 * DEADLINE)
            log.attend()

    def whole(self):
        """The follower has everything: a worker, and that there is no more."""
        sent = []
        self.log.begin(self.follower.address)
        self.log.append(WorkerMessage, b"peer", arrays=attach())
        self.log.hold(lambda: sent.append(True))
        self.log.append(StateComplete)
        while not sent:
            assert self.log.socket.poll(1000 * DEADLINE)
            self.log.attend()

    def end(self):
        self.thread.join(DEADLINE)
        assert not self.thread.is_alive()
        self.log.close()
        return self.found[0]


@pytest.fixture
def running():
    made = Running()
    yield made
    made.follower.stop()
    made.end()


def test_complete_follower_leads_when_the_leader_is_lost(running):
    running.whole()
    running.follower.leader_lost()
    assert running.end().models() == [("Adam-1", 0)]


def test_follower_does_not_lead_when_a_stranger_begins(running):
    running.whole()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{running.follower.address}")
        for stream in (8, running.log._stream):  # the second one is answered, as a copy
            stranger.send_multipart(FROM_LEADER.encode(BeginStream(stream, 0)))
        assert stranger.poll(1000 * DEADLINE)
    running.follower.stop()
    assert running.end() is None


def test_incomplete_follower_does_not_lead(running):
    running.begin(running.log, lambda log: log.is_begun)
    running.follower.leader_lost()
    running.follower.stop()
    assert running.end() is None


def test_invalid_messages_have_no_effect(running, caplog):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"tcp://{running.follower.address}")
        for frames in ([b"x"], [b""], [b"tfps\3junk", b"y"]):
            stranger.send_multipart(frames)
    running.begin(running.log, lambda log: log.is_begun)
    running.follower.stop()
    assert running.end() is None
    assert caplog.text.count("ignores invalid messages") <= 1
