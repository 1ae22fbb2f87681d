"""A shard's bookkeeping, also under random delays, deaths and duplicates."""

import random

import pytest

from tfdist.parameter_server.options.staleness import DropBeyond, Inverse
from tfdist.parameter_server.options.synchronization import Asynchronous, BoundedStaleness, SoftSync, Synchronous
from tfdist.parameter_server.protocol.messages import Decision
from tfdist.parameter_server.shard.ledger import Gradient, Ledger, weights


def ledger_of(mode, workers):
    ledger = Ledger(mode)
    for worker in range(workers):
        ledger.enter(worker)
        ledger.resume(worker)
    return ledger


def push(ledger, worker, clock, sequence=None, read=None, samples=1.0):
    """Pushes a step; returns the workers of each update that it makes due."""
    ledger.push(
        worker, clock if sequence is None else sequence, clock, ledger.version if read is None else read, samples
    )
    updates = []
    while due := ledger.due():
        updates.append([gradient.worker for gradient in due])
    return updates


def test_asynchronous_updates_are_applied_one_by_one():
    ledger = ledger_of(Asynchronous(), 3)
    assert push(ledger, 2, 0) == [[2]]
    assert push(ledger, 0, 0) == [[0]]
    assert ledger.version == 2
    assert ledger.may_read(2)


def test_softsync_averages_a_fixed_number_of_gradients():
    ledger = ledger_of(SoftSync(2), 4)
    assert push(ledger, 1, 0) == []
    assert push(ledger, 1, 1) == [[1, 1]], "also two of one worker"
    assert push(ledger, 0, 0) == []
    assert push(ledger, 3, 0) == [[0, 3]]


def test_synchronous_round_makes_one_update():
    ledger = ledger_of(Synchronous(), 3)
    assert push(ledger, 0, 0) == []
    assert push(ledger, 2, 0) == []
    assert not ledger.may_read(0)
    assert ledger.awaited_by(0) == {1}
    assert push(ledger, 1, 0) == [[0, 2, 1]]
    assert ledger.may_read(0)
    assert ledger.awaited_by(0) == set()
    push(ledger, 0, 1)
    assert not ledger.may_read(0)


def test_backup_workers_are_not_waited_for():
    ledger = ledger_of(Synchronous(backup_workers=1), 3)
    push(ledger, 0, 0)
    assert push(ledger, 1, 0) == [[0, 1]]
    assert push(ledger, 2, 0) == [], "too late"
    assert ledger.dropped == {2: 1}
    assert ledger.workers[2].round == (0, 1), "it goes on with the others"
    assert push(ledger, 2, 1) == []
    assert push(ledger, 1, 1) == [[2, 1]]
    push(ledger, 0, 2)
    push(ledger, 1, 2)
    push(ledger, 2, 1)
    assert ledger.workers[2].round == (0, 3)


def test_round_completes_when_the_missing_worker_dies():
    ledger = ledger_of(Synchronous(), 3)
    push(ledger, 0, 0)
    push(ledger, 1, 0)
    ledger.leave(2)
    assert [gradient.worker for gradient in ledger.due()] == [0, 1]


def test_dead_workers_gradient_counts_in_its_round():
    ledger = ledger_of(Synchronous(), 3)
    push(ledger, 2, 0)
    ledger.leave(2)
    assert push(ledger, 0, 0) == []
    assert push(ledger, 1, 0) == [[2, 0, 1]]


def test_returning_worker_has_one_gradient_in_a_round():
    ledger = ledger_of(Synchronous(), 3)
    push(ledger, 0, 0)
    ledger.leave(0)
    ledger.enter(0)
    assert ledger.workers[0].round == (0, 1)
    assert push(ledger, 1, 0) == []
    assert push(ledger, 2, 0) == [[0, 1, 2]]


def test_fastest_worker_waits_for_the_slowest_living_worker():
    ledger = ledger_of(BoundedStaleness(2), 3)
    push(ledger, 2, 0)
    for clock in range(3):
        assert ledger.may_read(0)
        push(ledger, 0, clock)
    assert not ledger.may_read(0)
    assert ledger.awaited_by(0) == {1}
    push(ledger, 1, 0)
    assert ledger.may_read(0)
    push(ledger, 0, 3)
    assert not ledger.may_read(0)
    ledger.leave(1)
    ledger.leave(2)
    assert ledger.may_read(0)


@pytest.mark.parametrize("mode", [BoundedStaleness(1), Synchronous()])
def test_late_worker_starts_at_the_clock_of_the_others(mode):
    ledger = ledger_of(mode, 2)
    for clock in range(5):
        push(ledger, 0, clock)
        push(ledger, 1, clock)
    assert ledger.enter(2) == 5
    assert ledger.may_read(2)


def test_late_worker_joins_the_current_round():
    ledger = ledger_of(Synchronous(), 2)
    assert [push(ledger, worker, 0) for worker in (0, 1)] == [[], [[0, 1]]]
    push(ledger, 0, 1)
    ledger.enter(7)
    assert push(ledger, 1, 1) == []
    assert ledger.awaited_by(0) == {7}
    assert push(ledger, 7, 0) == [[0, 1, 7]]


def test_suspended_worker_is_not_waited_for():
    ledger = ledger_of(BoundedStaleness(1), 2)
    for clock in range(2):
        push(ledger, 0, clock)
    assert not ledger.may_read(0)
    ledger.suspend(1)
    assert ledger.may_read(0)
    for clock in range(2, 10):
        push(ledger, 0, clock)
    push(ledger, 1, 0)
    assert ledger.workers[1].clock == 11, "as if it had made the steps that the others made meanwhile"
    ledger.suspend(0)
    ledger.suspend(1)
    assert ledger.may_read(1), "all of them"


def test_worker_is_not_waited_for_before_its_first_push():
    ledger = Ledger(BoundedStaleness(0))
    for worker in range(2):
        ledger.enter(worker)
    for clock in range(5):
        push(ledger, 0, clock)
        assert ledger.may_read(0)
    push(ledger, 1, 0)
    push(ledger, 0, 5)
    push(ledger, 0, 6)
    assert not ledger.may_read(0)


def test_rounds_wait_for_expected_and_suspended_workers():
    ledger = Ledger(Synchronous(), awaited={0, 1, 2})
    ledger.enter(0)
    assert push(ledger, 0, 0) == []
    ledger.enter(1)
    ledger.suspend(1)
    assert push(ledger, 1, 0) == []
    ledger.leave(2)
    assert [gradient.worker for gradient in ledger.due()] == [0, 1], "the third has ended before it came"


def test_calls_of_fit_may_have_different_numbers_of_steps():
    """Worker 0 makes one step in the first call, worker 1 two, and a third worker dies before it has made any."""
    ledger = ledger_of(Synchronous(), 3)
    push(ledger, 0, 0)
    push(ledger, 1, 0)
    ledger.leave(2)
    assert [gradient.worker for gradient in ledger.due()] == [0, 1]
    ledger.suspend(0, is_end=True)
    assert push(ledger, 0, 1) == [], "a step of the second call"
    assert ledger.awaited_by(0) == {1}
    assert push(ledger, 1, 1) == [[1]]
    ledger.suspend(1, is_end=True)
    assert ledger.due() == []
    assert ledger.round == (1, 0)
    assert push(ledger, 1, 2) == [[0, 1]]


def test_dead_workers_gradient_counts_before_the_next_fit():
    ledger = ledger_of(Synchronous(), 2)
    ledger.suspend(1, is_end=True)
    ledger.push(0, 0, 0, 0, 1.0)
    ledger.leave(0)
    assert push(ledger, 1, 0) == [[0], [1]]


def test_duplicates_are_known_by_their_number():
    ledger = ledger_of(Asynchronous(), 1)
    push(ledger, 0, 0, sequence=3)
    assert ledger.is_duplicate(0, 3)
    assert ledger.is_duplicate(0, 2)
    assert not ledger.is_duplicate(0, 4)
    ledger.enter(0)
    assert not ledger.is_duplicate(0, 0), "a worker that has come again counts anew"
    ledger.enter(0, 3)
    assert ledger.is_duplicate(0, 3), "the same one, which was taken for lost"


def test_staleness_is_the_number_of_updates_since_the_read():
    ledger = ledger_of(Asynchronous(Inverse()), 2)
    push(ledger, 0, 0, read=0)
    push(ledger, 0, 1, read=1)
    gradient = ledger.push(1, 0, 0, 0, 1.0)
    assert (gradient.staleness, gradient.scale) == (2, 0.5)
    assert ledger.staleness == {0: 2, 2: 1}


def test_dropped_gradients_are_counted():
    ledger = ledger_of(Asynchronous(DropBeyond(0)), 2)
    push(ledger, 0, 0, read=0)
    assert push(ledger, 1, 0, read=0) == []
    assert (ledger.counted, ledger.dropped) == ({0: 1}, {1: 1})


def test_weights_are_by_samples():
    gradients = [Gradient(0, 0, (0, 0), 3.0, 0, 1.0), Gradient(1, 0, (0, 0), 1.0, 0, 0.5)]
    assert weights(gradients) == [0.75, 0.125]
    assert weights([Gradient(0, 0, (0, 0), 0.0, 0, 1.0)] * 2) == [0.5, 0.5], "nobody had samples"


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "mode", [Asynchronous(), BoundedStaleness(0), BoundedStaleness(3), SoftSync(2), Synchronous(1)]
)
def test_random_schedules_count_or_drop_every_push_once(mode, seed):
    """Every push counts once or is dropped; a read at clock c has all updates below c - s of every live worker."""
    generator = random.Random(seed)
    ledger = ledger_of(mode, 4)
    clocks = dict.fromkeys(range(4), 0)
    read = dict.fromkeys(range(4), 0)
    sequences = dict.fromkeys(range(4), 0)
    applied = dict.fromkeys(range(5), 0)
    pushed = applied.copy()
    for _ in range(400):
        movable = [worker for worker in clocks if ledger.may_read(worker)]
        assert movable, "somebody can always move"
        worker = generator.choice(movable)
        lead = mode.lead()
        if lead is not None and not mode.in_rounds:
            assert min(clocks.values()) >= clocks[worker] - lead
        read[worker] = ledger.version
        for _ in range(generator.choice([1, 1, 2])):  # the second is a duplicate
            if not ledger.is_duplicate(worker, sequences[worker]):
                ledger.push(worker, sequences[worker], clocks[worker], read[worker], 1.0)
                pushed[worker] += 1
        while due := ledger.due():
            for gradient in due:
                applied[gradient.worker] += 1
        clocks[worker] = ledger.workers[worker].clock
        sequences[worker] += 1
        if generator.random() < 0.01 and len(clocks) > 2:
            gone = generator.choice(list(clocks))
            del clocks[gone]
            ledger.leave(gone)
            while due := ledger.due():
                for gradient in due:
                    applied[gradient.worker] += 1
    for gradient in ledger.waiting:
        applied[gradient.worker] += 1
    for worker in pushed:
        assert pushed[worker] == ledger.counted[worker] + ledger.dropped[worker]
        assert applied[worker] == ledger.counted[worker]
    assert sum(ledger.staleness.values()) == sum(ledger.counted.values())


def test_rounds_do_not_wait_for_workers_without_a_batch():
    ledger = ledger_of(Synchronous(), 3)
    ledger.set_idle(frozenset({2}))
    assert push(ledger, 0, 0) == []
    assert ledger.awaited_by(0) == {1}
    assert push(ledger, 1, 0) == [[0, 1]]
    ledger.set_idle(frozenset())
    assert push(ledger, 0, 1) == []
    assert ledger.awaited_by(0) == {1, 2}, "it is back, in the current round"
    assert push(ledger, 2, 0) == []
    assert push(ledger, 1, 1) == [[0, 2, 1]]
    assert not ledger.dropped


def test_expected_worker_without_a_batch_is_not_waited_for():
    ledger = ledger_of(Synchronous(), 1)
    ledger.awaited = {0, 1}
    ledger.enter(0)
    assert push(ledger, 0, 0) == []
    ledger.set_idle(frozenset({1}))
    assert [gradient.worker for gradient in ledger.due()] == [0]


def follow(ledger, worker, sequence, decision):
    ledger.follow(worker, sequence, ledger.version, 1.0, decision)
    updates = []
    while due := ledger.due():
        updates.append([gradient.worker for gradient in due])
    return updates


def test_server_follows_rounds_of_another_server():
    ledger = ledger_of(Synchronous(), 3)
    assert follow(ledger, 1, 0, Decision(1, 1.0, (0, 0), (0, 1))) == []
    assert not ledger.may_read(1)
    assert ledger.awaited_by(1) == {0}, "not for the third, which had no batch"
    assert follow(ledger, 0, 0, Decision(1, 1.0, (0, 0), (0, 1))) == [[1, 0]]
    assert follow(ledger, 2, 0, Decision(1, 1.0, (0, 1), (2,))) == [[2]]
    assert ledger.round == (0, 2)


def test_followed_round_does_not_wait_for_lost_workers():
    ledger = ledger_of(Synchronous(), 2)
    decision = Decision(1, 1.0, (0, 0), (0, 1))
    ledger.leave(1)
    assert follow(ledger, 0, 0, decision) == [[0]]
    ledger.enter(1)
    assert follow(ledger, 1, 0, decision) == [[1]], "it lives, and comes late"


def test_clocks_follow_the_deciding_server():
    ledger = ledger_of(BoundedStaleness(0), 2)
    follow(ledger, 0, 0, Decision(5, 0.5))
    assert (ledger.workers[0].clock, ledger.version) == (5, 1)
    assert not ledger.may_read(0)
    follow(ledger, 1, 0, Decision(5, 1.0))
    assert ledger.may_read(0)


def test_next_fit_does_not_wait_for_expected_worker_without_batch():
    ledger = ledger_of(Synchronous(), 1)
    ledger.awaited = {1}
    ledger.set_idle(frozenset({1}))
    assert push(ledger, 0, 0) == [[0]]
    ledger.suspend(0, is_end=True)
    ledger.set_idle(frozenset())
    assert push(ledger, 0, 1) == [[0]]
    assert ledger.round == (1, 1)
