"""Batches of an epoch: each is committed once, also under random orders, deaths, late copies and restarts."""

import json
import random

import pytest

from tfdist.parameter_server.dealing.dealer import Dealer
from tfdist.parameter_server.dealing.dealt_epoch import Batch, DealerError, EpochOver, WaitForBatch
from tfdist.parameter_server.dealing.plan import Plan

FIRST = (0, 0)


def dealer_of(workers, samples=10, batch_size=3, limit=2):
    """A dealer, and workers 0, 1, … in its first epoch."""
    dealer = Dealer(limit)
    for worker in range(workers):
        dealer.begin(worker, FIRST, samples, batch_size, 7)
    return dealer


def place(batch):
    return batch.start, batch.stop


def finish(dealer, worker, epoch):
    """One worker takes and commits all that is left; returns the places."""
    places = []
    while isinstance(batch := dealer.take(worker, epoch), Batch):
        dealer.commit(worker, batch.ticket)
        places.append(place(batch))
    assert batch == EpochOver()
    return places


def test_batches_cover_the_epoch_and_the_last_is_smaller():
    assert finish(dealer_of(1), 0, FIRST) == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_epoch_ends_after_all_batches_are_committed():
    dealer = dealer_of(2, samples=2, batch_size=1)
    mine, other = dealer.take(0, FIRST), dealer.take(1, FIRST)
    dealer.commit(0, mine.ticket)
    assert dealer.take(0, FIRST) == WaitForBatch()
    dealer.commit(1, other.ticket)
    assert dealer.take(0, FIRST) == dealer.take(1, FIRST) == EpochOver()


def test_batches_of_a_lost_worker_are_dealt_again():
    dealer = dealer_of(2, samples=2, batch_size=1)
    mine, other = dealer.take(0, FIRST), dealer.take(1, FIRST)
    dealer.commit(0, mine.ticket)
    dealer.lost(1)
    again = dealer.take(0, FIRST)
    assert place(again) == place(other)
    assert again.ticket != other.ticket


def test_late_push_of_a_lost_worker_is_rejected():
    dealer = dealer_of(2, samples=2, batch_size=1)
    dealer.commit(0, dealer.take(0, FIRST).ticket)
    late = dealer.take(1, FIRST)
    dealer.lost(1)
    assert not dealer.may_commit(1, late.ticket)
    with pytest.raises(DealerError, match=f"worker 1 no longer has the batch of ticket {late.ticket}"):
        dealer.commit(1, late.ticket)
    dealer.begin(1, FIRST, 2, 1, 7)
    again = dealer.take(1, FIRST)
    assert not dealer.may_commit(1, late.ticket), "not even now that it has the same batch again"
    assert dealer.take(0, FIRST) == WaitForBatch(), "the late push has committed nothing"
    dealer.commit(1, again.ticket)
    assert dealer.take(0, FIRST) == EpochOver()


def test_ticket_of_another_worker_is_rejected():
    dealer = dealer_of(2)
    ticket = dealer.take(0, FIRST).ticket
    assert dealer.may_commit(0, ticket)
    assert not dealer.may_commit(1, ticket)
    with pytest.raises(DealerError):
        dealer.commit(1, ticket)


def test_repeated_push_of_a_lost_worker_is_recognized():
    """Its answer may have been lost with the connection: the worker attaches again, and repeats the push."""
    dealer = dealer_of(2)
    ticket = dealer.take(0, FIRST).ticket
    dealer.commit(0, ticket)
    dealer.commit(0, ticket)
    assert dealer.is_committed(0, ticket)
    assert not dealer.may_commit(0, ticket), "it must not be applied a second time"
    dealer.lost(0)
    dealer.begin(0, FIRST, 10, 3, 7)
    assert dealer.is_committed(0, ticket)
    assert not dealer.is_committed(1, ticket)
    assert finish(dealer, 1, FIRST) == [(3, 6), (6, 9), (9, 10)]


def test_worker_holds_at_most_limit_batches():
    dealer = dealer_of(2, limit=2)
    first, second = dealer.take(0, FIRST), dealer.take(0, FIRST)
    assert dealer.take(0, FIRST) == WaitForBatch()
    assert isinstance(dealer.take(1, FIRST), Batch)
    dealer.commit(0, second.ticket)  # in any order
    assert isinstance(dealer.take(0, FIRST), Batch)
    dealer.commit(0, first.ticket)


def test_a_request_that_comes_twice_gets_one_batch():
    dealer = dealer_of(1)
    first = dealer.take(0, FIRST, request=4)
    assert dealer.take(0, FIRST, request=4) == first
    second = dealer.take(0, FIRST, request=5)
    assert place(second) == (3, 6)
    assert dealer.take(0, FIRST, request=4) == WaitForBatch(), "a late copy"
    dealer.commit(0, first.ticket)
    dealer.commit(0, second.ticket)
    assert dealer.take(0, FIRST, request=5) == WaitForBatch(), "a late copy of a request whose batch is committed"
    assert finish(dealer, 0, FIRST) == [(6, 9), (9, 10)]


def test_requests_of_a_worker_that_comes_back_are_numbered_anew():
    dealer = dealer_of(1)
    dealer.take(0, FIRST, request=9)
    dealer.lost(0)
    dealer.begin(0, FIRST, 10, 3, 7)
    assert place(dealer.take(0, FIRST, request=0)) == (0, 3)


def test_a_request_that_had_to_wait_gets_a_batch_later():
    dealer = dealer_of(2, samples=1, batch_size=1)
    dealer.take(0, FIRST, request=0)
    assert dealer.take(1, FIRST, request=0) == WaitForBatch()
    dealer.lost(0)
    assert place(dealer.take(1, FIRST, request=0)) == (0, 1)


@pytest.mark.parametrize("end", ["the chief takes it", "another one is committed", "the chief is lost", "a restart"])
def test_the_last_batch_is_kept_for_the_chief_at_first(end):
    """Others may wait for the values that the chief gives in its first step."""
    dealer = dealer_of(3, samples=2, batch_size=1)
    other = dealer.take(1, FIRST)
    for worker in (1, 2):
        assert dealer.take(worker, FIRST) == WaitForBatch()
    if end == "the chief takes it":
        assert place(dealer.take(0, FIRST)) == (1, 2)
        dealer.begin(2, (0, 1), 1, 1, 7)
        assert place(dealer.take(2, (0, 1))) == (0, 1)
        return
    if end == "another one is committed":
        dealer.commit(1, other.ticket)
    elif end == "the chief is lost":
        dealer.lost(0)
    else:
        dealer.restore(dealer.state())
        dealer.begin(2, FIRST, 2, 1, 7)
        dealer.take(2, FIRST)
    assert place(dealer.take(2, FIRST)) == (1, 2)


def test_a_batch_whose_gradients_were_dropped_is_dealt_again_after_the_others():
    dealer = dealer_of(2)
    first = dealer.take(0, FIRST)
    dealer.give_back(0, first.ticket)
    dealer.give_back(0, first.ticket)  # again, and without effect
    assert not dealer.may_commit(0, first.ticket)
    assert finish(dealer, 1, FIRST) == [(0, 3), (3, 6), (6, 9), (9, 10)]


def test_a_worker_that_joins_in_the_middle_takes_part_at_once():
    dealer = dealer_of(1)
    dealer.take(0, FIRST)
    assert dealer.begin(5, FIRST, 10, 3, 99) == Plan(10, 3, 7), "the seed is that of the first"
    assert place(dealer.take(5, FIRST)) == (3, 6)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((11, 3, 7), "has samples 11, and the worker that began it has samples 10"),
        ((10, 4, 7), "has a batch size of 4, and the worker that began it has a batch size of 3"),
        ((10, 3, None), "has shuffle False, and the worker that began it has shuffle True"),
        ((10, 3, 7, True), "has shuffle batch, and the worker that began it has shuffle True"),
    ],
)
def test_different_data_raise(given, what):
    dealer = dealer_of(1)
    with pytest.raises(DealerError, match=f"in epoch 0 of fit 0, worker 3 {what}"):
        dealer.begin(3, FIRST, *given)
    with pytest.raises(DealerError, match="worker 3 has to begin epoch 0 of fit 0"):
        dealer.take(3, FIRST)


@pytest.mark.parametrize(("samples", "batch_size"), [(0, 3), (3, 0), (-1, 1)])
def test_empty_epoch_raises(samples, batch_size):
    with pytest.raises(DealerError, match="an epoch needs at least one sample"):
        Dealer().begin(0, FIRST, samples, batch_size, None)


def test_limit_is_at_least_one():
    with pytest.raises(ValueError, match="at least 1; got 0"):
        Dealer(limit=0)


def test_a_worker_that_begins_a_later_epoch_gives_its_batches_back():
    """As when its callback has stopped the epoch."""
    dealer = dealer_of(2, samples=2, batch_size=1)
    held = dealer.take(0, FIRST)
    dealer.begin(0, (1, 0), 5, 5, 7)
    assert not dealer.may_commit(0, held.ticket)
    assert finish(dealer, 1, FIRST) == [(0, 1), (1, 2)]
    with pytest.raises(DealerError, match="has to begin epoch 0 of fit 1"):
        dealer.take(1, (1, 0))
    assert finish(dealer, 0, (1, 0)) == [(0, 5)]


def test_epoch_that_all_workers_left_is_over():
    dealer = dealer_of(2)
    dealer.take(0, FIRST)
    dealer.begin(0, (0, 1), 10, 3, 7)
    dealer.leave(1)
    dealer.begin(2, FIRST, 10, 3, 7)
    assert dealer.take(2, FIRST) == EpochOver()
    assert dealer.state()["epochs"][0]["epoch"] == [0, 1], "and forgotten"
    assert len(dealer.state()["epochs"]) == 1


def test_epoch_continues_when_a_dead_worker_returns():
    dealer = dealer_of(2)
    dealer.commit(0, dealer.take(0, FIRST).ticket)
    dealer.take(1, FIRST)
    dealer.lost(0)
    dealer.lost(1)
    dealer.begin(1, FIRST, 10, 3, 7)
    assert sorted(finish(dealer, 1, FIRST)) == [(3, 6), (6, 9), (9, 10)]


def test_restarted_worker_skips_finished_epochs():
    dealer = dealer_of(1)
    finish(dealer, 0, FIRST)
    dealer.begin(0, (0, 5), 10, 3, 7)  # initial_epoch=5
    for missed in [(0, 0), (0, 1), (0, 4)]:
        dealer.begin(1, missed, 10, 3, 7)
        assert dealer.take(1, missed) == EpochOver()
    dealer.begin(1, (0, 5), 10, 3, 7)
    assert place(dealer.take(1, (0, 5))) == (0, 3)


def test_restarted_worker_resumes_the_interrupted_epoch():
    dealer = dealer_of(1)
    finish(dealer, 0, FIRST)
    dealer.begin(0, (0, 1), 10, 3, 7)
    dealer.commit(0, dealer.take(0, (0, 1)).ticket)
    dealer.lost(0)
    dealer.begin(0, FIRST, 10, 3, 7)
    assert dealer.take(0, FIRST) == EpochOver()
    dealer.begin(0, (0, 1), 10, 3, 7)
    assert finish(dealer, 0, (0, 1)) == [(3, 6), (6, 9), (9, 10)]


def test_workers_without_a_batch_are_idle():
    dealer = dealer_of(3, samples=3, batch_size=1, limit=2)
    batches = [dealer.take(0, FIRST), dealer.take(0, FIRST), dealer.take(1, FIRST)]
    assert dealer.take(0, FIRST) == WaitForBatch()
    assert dealer.idle == set(), "it has batches of its own"
    assert dealer.take(2, FIRST) == WaitForBatch()
    assert dealer.idle == {2}
    dealer.lost(1)
    taken = dealer.take(2, FIRST)
    assert place(taken) == place(batches[2])
    assert dealer.idle == set()
    for batch in batches[:2]:
        dealer.commit(0, batch.ticket)
    assert dealer.take(0, FIRST) == WaitForBatch()
    assert dealer.idle == {0}
    dealer.commit(2, taken.ticket)
    assert dealer.take(0, FIRST) == EpochOver()
    assert dealer.idle == {0}, "nobody waits for it until it has begun another epoch"
    dealer.begin(0, (0, 1), 3, 1, None)
    assert dealer.idle == set()


def test_calls_of_an_unknown_worker_are_ignored():
    dealer = dealer_of(1)
    dealer.lost(8)
    dealer.leave(8)
    dealer.give_back(8, 3)
    assert not dealer.is_committed(8, 3)
    assert len(finish(dealer, 0, FIRST)) == 4


def test_snapshot_restores_committed_batches():
    dealer = dealer_of(2)
    done, out = dealer.take(0, FIRST), dealer.take(1, FIRST)
    dealer.commit(0, done.ticket)
    state = json.loads(json.dumps(dealer.state()))
    after = dealer.take(0, FIRST)
    dealer.commit(0, after.ticket)

    restored = Dealer()
    restored.restore(state)
    assert restored.is_committed(0, done.ticket)
    assert not restored.may_commit(1, out.ticket)
    with pytest.raises(DealerError, match="has to begin"):
        restored.take(1, FIRST)
    assert restored.begin(1, FIRST, 10, 3, 5) == Plan(10, 3, 7)
    assert sorted(finish(restored, 1, FIRST)) == [(3, 6), (6, 9), (9, 10)], "also what was committed after the snapshot"
    assert restored.state()["newest"] == [0, 0]
    restored.begin(1, FIRST, 10, 3, 5)
    assert restored.take(1, FIRST) == EpochOver()


def test_snapshot_of_a_new_dealer_is_restored():
    restored = Dealer()
    restored.restore(json.loads(json.dumps(Dealer().state())))
    restored.begin(0, FIRST, 2, 1, None)
    assert finish(restored, 0, FIRST) == [(0, 1), (1, 2)]


def test_tickets_differ_after_a_restart():
    """The same worker, the same number of hand-outs, and another batch."""
    state = dealer_of(1).state()
    tickets = set()
    for _ in range(20):
        restored = Dealer()
        restored.restore(state)
        restored.begin(0, FIRST, 10, 3, 7)
        tickets |= {restored.take(0, FIRST).ticket, restored.take(0, FIRST).ticket}
    assert len(tickets) == 40
    assert max(tickets) < 2**63


class Simulation:
    """Workers and a server that exchange messages, which may be late or come twice.

    A worker holds up to two batches, pushes them, and repeats a push until it is acknowledged or refused. The server
    applies a push as `tfdist.parameter_server.dealing.dealer` describes.
    """

    def __init__(self, seed, workers, samples, batch_size, epochs):
        self.random = random.Random(seed)
        self.dealer = Dealer()
        self.samples, self.batch_size, self.epochs = samples, batch_size, epochs
        self.applied = {epoch: [] for epoch in epochs}
        self.workers = {worker: self.fresh() for worker in range(workers)}
        self.late = []  # pushes that are still on their way, of workers that may be gone
        self.snapshot = None

    def fresh(self):
        return {"place": 0, "begun": False, "held": [], "request": 0}

    def push(self, worker, epoch, batch):
        """What the server does with a push; True if the worker may forget the batch."""
        if self.dealer.is_committed(worker, batch.ticket):
            return True
        if not self.dealer.may_commit(worker, batch.ticket):
            return True
        if self.random.random() < 0.05:
            self.dealer.give_back(worker, batch.ticket)  # too late for the staleness policy
            return True
        self.applied[epoch].append(place(batch))
        self.dealer.commit(worker, batch.ticket)
        return self.random.random() < 0.9  # else the answer is lost, and the worker pushes again

    def step(self, worker):
        state = self.workers[worker]
        if state["place"] == len(self.epochs):
            return
        epoch = self.epochs[state["place"]]
        if not state["begun"]:
            self.dealer.begin(worker, epoch, self.samples, self.batch_size, 1)
            state["begun"] = True
        if state["held"] and self.random.random() < 0.5:
            batch = state["held"][0]
            if self.random.random() < 0.2:
                self.late.append((worker, epoch, batch))
            if self.push(worker, epoch, batch):
                state["held"].pop(0)
            return
        answer = self.dealer.take(worker, epoch, state["request"])
        if self.random.random() < 0.1:
            return  # the answer is lost: the worker asks again with the same number
        if isinstance(answer, Batch):
            state["request"] += 1
            if answer not in state["held"]:
                state["held"].append(answer)
        elif answer == EpochOver():
            assert not state["held"] or all(not self.dealer.may_commit(worker, held.ticket) for held in state["held"])
            state.update(place=state["place"] + 1, begun=False, held=[])

    def trouble(self):
        chance = self.random.random()
        worker = self.random.choice(list(self.workers))
        if chance < 0.02:  # it dies, and starts again at the first epoch
            self.late += [(worker, self.epochs[self.workers[worker]["place"]], held) for held in self.held(worker)]
            self.dealer.lost(worker)
            self.workers[worker] = self.fresh()
        elif chance < 0.03:  # it was only slow: it has to begin again, and still has its batches
            self.dealer.lost(worker)
            self.workers[worker].update(begun=False, request=0)
        elif chance < 0.04:
            newcomer = max(self.workers) + 1
            if newcomer < 8:
                self.workers[newcomer] = self.fresh()
        elif chance < 0.06:
            self.snapshot = json.dumps(self.dealer.state()), {key: list(entry) for key, entry in self.applied.items()}
        elif chance < 0.065 and self.snapshot:  # the server starts again, and its updates since the snapshot are gone
            self.dealer = Dealer()
            self.dealer.restore(json.loads(self.snapshot[0]))
            self.applied = {key: list(entry) for key, entry in self.snapshot[1].items()}
            for entry in self.workers.values():
                entry.update(begun=False, request=0, place=0)
        elif chance < 0.15 and self.late:
            self.push(*self.late.pop(self.random.randrange(len(self.late))))

    def held(self, worker):
        state = self.workers[worker]
        return state["held"] if state["place"] < len(self.epochs) else []

    def run(self, troubled_steps):
        for _ in range(troubled_steps):
            self.trouble()
            self.step(self.random.choice(list(self.workers)))
        steps = 0
        while any(state["place"] < len(self.epochs) for state in self.workers.values()):
            self.step(self.random.choice(list(self.workers)))
            steps += 1
            assert steps < 20_000, "nobody gets on"
        while self.late:
            self.push(*self.late.pop())


@pytest.mark.parametrize("seed", range(60))
def test_every_sample_is_committed_once_whatever_happens(seed):
    choose = random.Random(seed)
    samples, batch_size = choose.randint(1, 60), choose.randint(1, 7)
    epochs = [(0, 0), (0, 1), (1, 3)]
    simulation = Simulation(seed, choose.randint(1, 5), samples, batch_size, epochs)
    simulation.run(choose.randint(0, 600))
    for epoch in epochs:
        rows = sorted(row for start, stop in simulation.applied[epoch] for row in range(start, stop))
        assert rows == list(range(samples)), epoch
    assert simulation.dealer.state()["epochs"] == []


def test_uncommitted_batches_of_a_snapshot_keep_their_epoch():
    """Worker 0 has gone on to the second epoch. Of each epoch a committed batch waits for others' gradients."""
    second = (0, 1)
    dealer = dealer_of(2, samples=4, batch_size=1)
    dealer.take(0, FIRST)
    waits = dealer.take(1, FIRST)
    dealer.commit(1, waits.ticket)
    dealer.begin(0, second, 4, 1, 7)
    too = dealer.take(0, second)
    dealer.commit(0, too.ticket)
    state = json.loads(json.dumps(dealer.state([(1, waits.ticket), (0, too.ticket)])))
    restored = Dealer()
    restored.restore(state)
    for epoch in (FIRST, second):
        restored.begin(1, epoch, 4, 1, 7)
        assert sorted(finish(restored, 1, epoch)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
