"""Pushes of batches that were dealt; `test_shard.py` has them with values."""

import pytest

from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.options.staleness import DropBeyond
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronous
from tfdist.parameter_server.protocol.dealing import BeginEpoch, TakeBatch
from tfdist.parameter_server.protocol.messages import Decision, Pull, Push
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.tickets import Tickets


def push(ticket, sequence=0, worker=0, read=0, decision=None):
    return Push(1, worker, 1, sequence, sequence, read, 1.0, dealt=ticket if decision is None else decision)


class Talk:
    """Workers 0 and 1, and the batches of an epoch."""

    def __init__(self, mode=Asynchronous()):  # noqa: B008
        self.tickets = Tickets(Ledger(mode), DealerService())
        self.answers = []
        for worker in (0, 1):
            self.tickets.ledger.enter(worker)
            self.say(BeginEpoch(1, worker, 1, 0, 0, 4, 1, None))

    def say(self, message):
        self.tickets.deals.heard(message, [], lambda answer, arrays: self.answers.append(answer))
        return self.answers[-1]

    def take(self, worker=0, request=0):
        return self.say(TakeBatch(1, worker, 1, 0, 0, request)).ticket


def test_push_commits_its_batch_and_has_a_decision():
    talk = Talk()
    message = push(talk.take())
    assert not talk.tickets.is_refused(message)
    assert not talk.tickets.settle(message, talk.tickets.counted(message))
    assert talk.tickets.decision(message) == Decision(clock=1, scale=1.0)
    assert not talk.tickets.is_refused(message), "a copy of it"
    assert talk.tickets.counted(message) is None
    talk.tickets.ledger.suspend(0)
    assert talk.tickets.decision(message).clock is None


def test_push_of_a_lost_workers_batch_is_refused():
    talk = Talk()
    message = push(talk.take())
    talk.tickets.deals.lost(0)
    assert talk.tickets.is_refused(message)


def test_a_push_that_is_dropped_gives_its_batch_back():
    talk = Talk(Asynchronous(DropBeyond(0)))
    talk.tickets.ledger.version = 3
    message = push(talk.take())
    assert talk.tickets.settle(message, talk.tickets.counted(message))
    assert talk.tickets.decision(message) is None
    assert not talk.tickets.deals.may_commit(0, message.ticket)


def test_decision_lists_the_workers_of_the_round():
    talk = Talk(Synchronous())
    messages = [push(talk.take(worker), worker=worker) for worker in (0, 1)]
    for message in messages:
        talk.tickets.settle(message, talk.tickets.counted(message))
    assert talk.tickets.decision(messages[0]).peers == ()
    talk.tickets.updated(talk.tickets.ledger.due())
    assert talk.tickets.decision(messages[0]).peers == (0, 1)


def test_server_follows_the_decision_of_another_server():
    follows = Tickets(Ledger(Asynchronous()))
    follows.ledger.enter(0)
    message = push(None, decision=Decision(clock=7, scale=0.5))
    assert not follows.is_refused(message)
    counted = follows.counted(message)
    assert (counted.scale, follows.ledger.workers[0].clock) == (0.5, 7)
    assert not follows.settle(message, counted)
    assert follows.books([]) is None


@pytest.mark.parametrize("message", [push(None), Pull(1, 0, 1)])
def test_without_a_ticket_there_is_nothing_to_decide(message):
    assert Talk().tickets.decision(message) is None
