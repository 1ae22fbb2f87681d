"""The shards of several models, without sockets and without values."""

import pytest

from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.parameter_server.protocol.messages import Attach, Attached, Done, LeaveModel, Pull, Refused, Waiting
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard


class Talk:
    """Shards, and the last answer of each peer; a peer is a worker's connection for one model."""

    def __init__(self, awaited=()):
        self.awaited = set(awaited)
        self.shards = Shards(lambda model, occurrence: Shard(Ledger(Asynchronous(), awaited=self.awaited)))
        self.answers = {}

    def say(self, peer, message):
        def answer(message, arrays):
            self.answers[peer] = message

        self.answers.pop(peer, None)
        self.shards.heard(peer.encode(), message, [], answer)
        return self.answers.get(peer)

    def attach(
        self, worker, model="Adam-1", place=0, occurrence=0, incarnation=1, variables=("v [1] float32",), options=()
    ):
        attached = Attach(1, worker, incarnation, model, occurrence, place, variables, options=options)
        return self.say(f"{worker} {place}", attached)

    def leave(self, worker, place=0, is_over=True):
        return self.say(f"{worker} {place}", LeaveModel(2, worker, 1, is_over))


def test_connection_without_attach_is_refused():
    assert Talk().say("stranger", Pull(1, 0, 1)) == Refused(1, "this connection has not attached", is_unknown=True)


def test_another_model_than_the_chiefs_is_refused():
    talk = Talk()
    assert isinstance(talk.attach(0), Attached)
    assert isinstance(talk.attach(1), Attached)
    assert (
        "variable 1 is w [2] float32, the chief's is v [1] float32"
        in talk.attach(2, "2", variables=("w [2] float32",)).why
    )
    assert "variable 2 is w [2] float32, the chief's is none" in (
        talk.attach(3, "3", variables=("v [1] float32", "w [2] float32")).why
    )
    assert "the model SGD-1, but the chief trains Adam-1" in talk.attach(4, "SGD-1").why
    assert len(list(talk.shards)) == 1


def test_another_optimizer_is_refused_with_the_next_message_after_the_chief_begins():
    """The worker, which came first, has nothing under way then."""
    talk = Talk()
    assert isinstance(talk.attach(1, options=("momentum=0.5",)), Attached)
    assert isinstance(talk.attach(0, options=("momentum=0.9",)), Attached)
    assert "momentum=0.5, the chief's momentum=0.9" in talk.say("1 0", Pull(2, 1, 1)).why


def test_another_model_is_refused_when_the_chief_begins_its_own():
    talk = Talk()
    talk.attach(1, "SGD-1")
    assert isinstance(talk.say("1 0", Pull(2, 1, 1)), Waiting)
    talk.attach(0)
    assert "the chief trains Adam-1" in talk.answers["1 0"].why


def test_restarted_task_may_skip_models():
    talk = Talk()
    for worker in range(2):
        talk.attach(worker, "Adam-1")
        talk.attach(worker, "Adam-2", place=1)
    assert isinstance(talk.attach(1, "Adam-2", incarnation=2), Attached)
    assert isinstance(talk.attach(0, "Adam-2", incarnation=2), Attached)
    assert isinstance(talk.attach(0, "Adam-3", place=1, incarnation=2), Attached)
    assert isinstance(talk.attach(2, "Adam-1"), Attached), "the chief's program is not known any more"
    assert len(list(talk.shards)) == 3


def test_model_is_dropped_when_all_workers_left():
    talk = Talk(awaited=(0, 1, 2))
    for worker in range(2):
        talk.attach(worker)
    assert isinstance(talk.leave(0), Done)
    talk.leave(1, is_over=False)
    assert len(list(talk.shards)) == 1, "the third has not come yet"
    talk.shards.lost(2)
    assert list(talk.shards) == []
    assert talk.attach(2) == Refused(1, "all other workers have finished training the model Adam-1", is_over=True)
    talk.attach(0, occurrence=1, place=1)
    assert talk.attach(2).newest == 1


def test_model_is_kept_until_the_chief_leaves():
    """The chief may have died, and come back."""
    talk = Talk()
    talk.attach(0)
    talk.attach(1)
    talk.leave(1)
    talk.shards.lost(0)
    assert len(list(talk.shards)) == 1


def test_connections_that_are_gone_are_forgotten():
    talk = Talk()
    talk.attach(0)
    talk.attach(1)
    talk.say("another connection", Attach(1, 1, 1, "Adam-1"))
    assert len(talk.shards.peers) == 2
    talk.shards.lost(1)
    assert len(talk.shards.peers) == 1
    talk.leave(0, is_over=False)
    assert not talk.shards.peers


@pytest.mark.parametrize("name", ["", "../x", "a/b", "..", "x" * 201, "a\0"])
def test_invalid_model_name_creates_no_shard(name):
    talk = Talk()
    assert "not a valid name of a model" in talk.say("a stranger", Attach(1, 0, 1, name)).why
    assert not talk.shards.models()
