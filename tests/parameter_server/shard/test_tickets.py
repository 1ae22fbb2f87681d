"""Pushes of batches that were dealt: the books about them, and what a shard does."""

import pytest

from tests.parameter_server.shard.talk import ONES, Dealing, Talk
from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.options.staleness import DropBeyond
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronous
from tfdist.parameter_server.protocol.dealing import BeginEpoch, TakeBatch
from tfdist.parameter_server.protocol.messages import Decision, Pull, Push, Waiting
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.tickets import Tickets


def push(ticket, sequence=0, worker=0, read=0, decision=None):
    return Push(1, worker, 1, sequence, sequence, read, 1.0, dealt=ticket if decision is None else decision)


class Books:
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
    talk = Books()
    message = push(talk.take())
    assert not talk.tickets.is_refused(message)
    assert not talk.tickets.settle(message, talk.tickets.counted(message))
    assert talk.tickets.decision(message) == Decision(clock=1, scale=1.0)
    assert not talk.tickets.is_refused(message), "a copy of it"
    assert talk.tickets.counted(message) is None
    talk.tickets.ledger.suspend(0)
    assert talk.tickets.decision(message).clock is None


def test_push_of_a_lost_workers_batch_is_refused():
    talk = Books()
    message = push(talk.take())
    talk.tickets.deals.lost(0)
    assert talk.tickets.is_refused(message)


def test_a_push_that_is_dropped_gives_its_batch_back():
    talk = Books(Asynchronous(DropBeyond(0)))
    talk.tickets.ledger.version = 3
    message = push(talk.take())
    assert talk.tickets.settle(message, talk.tickets.counted(message))
    assert talk.tickets.decision(message) is None
    assert not talk.tickets.deals.may_commit(0, message.ticket)


def test_decision_lists_the_workers_of_the_round():
    talk = Books(Synchronous())
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
    assert Books().tickets.decision(message) is None


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
