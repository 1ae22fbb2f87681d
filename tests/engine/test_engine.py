"""The engine's bookkeeping, with the rendezvous server's answers played by a fake; transfers are between threads."""

import threading

import numpy as np
import pytest

from tfdist.cluster.messages import Stalled, StallReport, WaitingForCall
from tfdist.cluster.settings import Timeouts
from tfdist.collectives import ring
from tfdist.comm.local import LocalWorld
from tfdist.engine.engine import Engine
from tfdist.engine.group import ProcessGroup
from tfdist.errors import CollectiveTimeoutError, MismatchError, PeerLostError, TfdistError


class Agreeing:
    """Numbers keys as the server does, the same for all ranks, and explains stalls: rank 1 is late."""

    numbers: dict[str, int]

    def __init__(self):
        self.numbers, self.failure, self.departed, self.names, self.joined = {}, None, {}, {}, {}
        self.lock = threading.Lock()
        self.told, self.stall = [], None

    def attend(self, listener):
        pass

    def tell_failure(self, error, members=None):
        self.told.append(error)

    def send(self, message):
        if isinstance(message, Stalled):
            self.stall = StallReport("", {1: "rank 1, worker 1,"})

    def ask(self, make, then, refused):
        message = make(0)
        with self.lock:
            number = self.numbers.setdefault((message.key, message.members), len(self.numbers))
        then(number)


@pytest.fixture
def engines():
    world, control = LocalWorld(2), Agreeing()
    made = [Engine(world.communicator(rank), control, Timeouts(collective=0.3), tags=1 << 20) for rank in range(2)]
    yield made, control
    for engine in made:
        engine.close()


def on_both(engines, work):
    results = [None, None]

    def run(rank):
        try:
            results[rank] = work(rank, engines[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    return results


def test_collectives_are_matched_by_key_in_any_order(engines):
    made, _ = engines

    def work(rank, engine):
        a, b = np.full(10, 1.0 + rank), np.full(20, 10.0 + rank)
        posts = [("a", a), ("b", b)] if rank == 0 else [("b", b), ("a", a)]
        pending = [engine.post(key, ring.all_reduce(buffer)) for key, buffer in posts]
        for collective in pending:
            engine.wait(collective)
        return a[0], b[0]

    assert on_both(made, work) == [(3.0, 21.0)] * 2


def test_posted_collective_progresses_without_waiting(engines):
    made, _ = engines
    arrived = threading.Event()

    def work(rank, engine):
        buffer = np.full(1000, 1.0)
        pending = engine.post("x", ring.all_reduce(buffer))
        while not pending.done:
            assert not arrived.wait(0.001)
        return buffer[0]

    assert on_both(made, work) == [2.0, 2.0]


def test_a_wait_leaves_what_is_under_way_to_the_progress_thread(engines):
    """A caller that wanted to wait at once may wait for something else."""
    made, _ = engines
    has_waited, arrived = threading.Event(), threading.Event()

    def work(rank, engine):
        buffer = np.full(1000, 1.0)
        if rank == 0:
            pending = engine.post("left", ring.all_reduce(buffer), overlaps=False)
        engine.run("waited for", ring.all_reduce(np.ones(3)))
        if rank == 0:
            has_waited.set()
        else:
            assert has_waited.wait(100)
            pending = engine.post("left", ring.all_reduce(buffer))
        while not pending.done:
            assert not arrived.wait(0.001)
        return buffer[0]

    assert on_both(made, work) == [2.0, 2.0]


def test_concurrent_calls_of_one_key_are_matched_in_order(engines):
    made, _ = engines

    def work(rank, engine):
        buffers = [np.full(100, float(call)) for call in range(4)]
        pending = [engine.post("x", ring.all_reduce(buffer)) for buffer in buffers]
        for collective in reversed(pending):
            engine.wait(collective)
        return [buffer[0] for buffer in buffers]

    assert on_both(made, work) == [[0.0, 2.0, 4.0, 6.0]] * 2


def test_missing_rank_raises_timeout_in_this_and_later_calls(engines):
    made, _ = engines
    with pytest.raises(CollectiveTimeoutError, match=r"0.3 s in alone \(call 1\), in which rank 1, worker 1, did"):
        made[0].run("alone", ring.all_reduce(np.ones(3)))
    with pytest.raises(CollectiveTimeoutError):  # and so does everything after it
        made[0].run("other", ring.all_reduce(np.ones(3)))


class Finding(Agreeing):
    """Finds a circle as soon as a rank reports that it stands still."""

    def send(self, message):
        super().send(message)
        if isinstance(message, WaitingForCall):
            self.failure = MismatchError("a circle")


@pytest.mark.parametrize(("has_thread", "error"), [(False, MismatchError), (True, CollectiveTimeoutError)])
def test_rank_stands_still_unless_its_threads_may_call_something_else(has_thread, error):
    engine = Engine(LocalWorld(2).communicator(0), Finding(), Timeouts(collective=2))
    if has_thread:
        thread = threading.Thread(target=engine.post, args=("of a thread", ring.all_reduce(np.ones(5))))
        thread.start()
        thread.join()
    with pytest.raises(error):
        engine.run("a", ring.all_reduce(np.ones(5)))
    engine.close()


def test_waiting_for_a_departed_rank_raises(engines):
    made, control = engines
    control.names[1], control.departed[1] = "rank 1, worker 1,", {}
    with pytest.raises(PeerLostError, match=r"rank 0 waits in x .* but rank 1, worker 1, has ended its script"):
        made[0].run("x", ring.all_reduce(np.ones(3)))


def test_broken_transfer_is_explained_by_the_rank_that_caused_it(engines):
    made, control = engines
    cause = PeerLostError("rank 1 died")

    def breaks(comm, tag):
        control.failure = cause
        raise OSError("connection reset")
        yield

    with pytest.raises(PeerLostError, match="rank 1 died"):
        made[0].run("x", breaks)
    assert made[0].failure is cause


class Broken(Exception):
    """As MPI's errors are, by its module."""

    __module__ = "mpi4py.MPI"


def breaks_while(loss):
    """Returns a plan whose transfer breaks before its cause is told, which another thread then does."""

    def plan(comm, tag):
        yield ()
        threading.Thread(target=loss).start()
        raise Broken("process_vm_readv")

    return plan


def test_broken_transfer_is_explained_by_a_loss_that_is_told_later(engines):
    made, control = engines
    cause = PeerLostError("rank 1 died")

    def loss():  # as the control connection's thread does
        assert not made[0].survives(1, cause)
        control.failure = cause

    with pytest.raises(PeerLostError, match="rank 1 died"):
        made[0].run("x", breaks_while(loss))
    assert made[0].failure is cause


def test_local_failure_is_reported_to_other_ranks(engines):
    made, control = engines

    def breaks(comm, tag):
        yield ()
        raise MemoryError("no more")

    with pytest.raises(MemoryError):
        made[0].run("x", breaks)
    assert [str(error) for error in control.told] == ["rank 0 failed in a collective: MemoryError: no more"]
    with pytest.raises(TfdistError, match="no more"):
        made[0].run("y", ring.all_reduce(np.ones(3)))


def test_a_schedule_that_failed_is_not_taken_for_done(engines):
    made, _ = engines
    failing = threading.Event()

    def breaks(comm, tag):
        yield ()
        failing.set()
        raise MemoryError("no more")

    pending = made[0].post("x", breaks)  # the progress thread resumes it
    assert failing.wait(100)
    with pytest.raises((MemoryError, TfdistError), match="no more"):
        made[0].wait(pending)


def test_new_key_is_requested_once_by_concurrent_threads(engines):
    made, control = engines
    asked = []
    answer = control.ask
    control.ask = lambda make, *then: (asked.append(make(0).key), answer(make, *then))[1]
    gate = threading.Barrier(4)

    def sums(rank, engine):
        def post(thread):
            gate.wait(100)
            posted[thread] = engine.post("new", ring.all_reduce(np.ones(3)))

        posted = [None] * 4
        threads = [threading.Thread(target=post, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(100)
        return sorted(pending.call for pending in posted)

    assert sums(0, made[0]) == [0, 1, 2, 3]
    assert asked == ["new"]


class Late(Agreeing):
    """Numbers a key when both ranks have asked, as the server does, on the thread of the one that asks last."""

    def __init__(self):
        super().__init__()
        self.waiting = {}

    def ask(self, make, then, refused):
        message = make(0)
        site = (message.key, message.members)
        with self.lock:
            waiting = self.waiting.setdefault(site, [])
            waiting.append(then)
            if len(waiting) < len(message.members or range(2)):
                return
            number = self.numbers.setdefault(site, len(self.numbers))
        for callback in waiting:
            callback(number)


class Undoing(Agreeing):
    """Has ranks differ in some keys."""

    def ask(self, make, then, refused):
        if make(0).key.startswith("wrong"):
            threading.Thread(target=refused, args=("they differ",)).start()
        else:
            super().ask(make, then, refused)


@pytest.mark.parametrize("is_alone", [True, False])
def test_refused_calls_raise_and_are_not_counted(is_alone):
    """The job goes on if a rank has nothing else under way."""
    world, control = LocalWorld(2), Undoing()
    made = [Engine(world.communicator(rank), control, Timeouts(collective=20), tags=1 << 20) for rank in range(2)]

    def work(rank, engine):
        if not is_alone:
            engine.post(f"of rank {rank}", ring.all_reduce(np.ones(5)), overlaps=False)
        for _ in range(2):
            with pytest.raises(MismatchError, match="they differ"):
                engine.run(f"wrong {rank}", ring.all_reduce(np.ones(5)))
        if is_alone:
            total = np.ones(5)
            engine.run("right", ring.all_reduce(total))
            assert total.tolist() == [2.0] * 5
            assert engine.under_way() == []
            assert engine.numbers.counts() == {0: 1}
        return engine.failure is None

    try:
        assert on_both(made, work) == [is_alone] * 2
        for engine in made:
            cause = engine.cause_of("Graph execution error: MismatchError: they differ [[node]]")
            assert cause is engine.failure or str(cause) == "they differ"
            assert (engine.cause_of("Graph execution error: another") is None) == is_alone
    finally:
        for engine in made:
            engine.close()


def test_a_hundred_new_keys_posted_in_opposite_orders():
    world, control = LocalWorld(2), Late()
    made = [Engine(world.communicator(rank), control, Timeouts(collective=20), tags=1 << 20) for rank in range(2)]

    def work(rank, engine):
        buffers = {f"key {number}": np.full(5, float(number)) for number in range(100)}
        names = list(buffers) if rank == 0 else list(reversed(buffers))
        pending = [engine.post(name, ring.all_reduce(buffers[name])) for name in names]
        for collective in pending:
            engine.wait(collective)
        return [float(buffer[0]) for buffer in buffers.values()]

    try:
        assert on_both(made, work) == [[2.0 * number for number in range(100)]] * 2
    finally:
        for engine in made:
            engine.close()


def test_more_calls_of_one_key_than_tags():
    world, control = LocalWorld(2), Late()
    made = [Engine(world.communicator(rank), control, Timeouts(collective=20), tags=1 << 20) for rank in range(2)]

    def work(rank, engine):
        buffers = [np.full(5, float(call)) for call in range(30)]
        pending = [engine.post("x", ring.all_reduce(buffer)) for buffer in buffers]  # all of them before the first wait
        for collective in reversed(pending):
            engine.wait(collective)
        return [float(buffer[0]) for buffer in buffers]

    try:
        assert on_both(made, work) == [[2.0 * call for call in range(30)]] * 2
    finally:
        for engine in made:
            engine.close()


def test_calls_start_in_order_when_key_number_arrives_late():
    class Held(Agreeing):
        def ask(self, make, then, refused):
            self.answer = then

    def number_of(site):
        """Numbers come when the queue's fourth call is looked up."""
        lookups.append(site)
        if len(lookups) == calls + 4:  # each call has looked once when it was posted
            control.answer(0)
        return of(site)

    calls, control, started, lookups = 10, Held(), [], []
    engine = Engine(LocalWorld(2).communicator(0), control, Timeouts(), tags=1 << 20)

    def plan(call):
        def schedule(comm, tag):
            started.append(call)
            yield ()

        return schedule

    of, engine.numbers.of = engine.numbers.of, number_of
    for call in range(calls):
        engine.post("x", plan(call), overlaps=False)
    for _ in range(100):
        engine.advance()
    engine.close()
    assert started == list(range(calls))


def test_different_groups_can_use_equal_keys(engines):
    made, _ = engines

    def work(rank, engine):
        alone, both, turned = ProcessGroup(engine, (rank,)), ProcessGroup(engine), ProcessGroup(engine, (1, 0))
        buffers = [np.full(4, 1.0 + rank) for _ in range(3)]
        groups = [alone, both, turned] if rank == 0 else [turned, alone, both]
        pending = [
            (group, group.post("x", ring.all_reduce(buffer))) for group, buffer in zip(groups, buffers, strict=True)
        ]
        for group, collective in pending:
            group.wait(collective)
        return {str(group): float(buffer[0]) for group, buffer in zip(groups, buffers, strict=True)}

    assert on_both(made, work) == [
        {f"Group([{rank}])": 1.0 + rank, "Group([0, 1])": 3.0, "Group([1, 0])": 3.0} for rank in range(2)
    ]


@pytest.fixture
def one_of_three():
    """The engine of rank 0; the others take no part."""
    engine = Engine(LocalWorld(3).communicator(0), Agreeing(), Timeouts(), tags=1 << 20)
    yield engine
    engine.close()


def posted(engine, *members):
    return ProcessGroup(engine, members).post("x", ring.all_reduce(np.ones(3)), overlaps=False)


DIED = PeerLostError("rank 2 died")


def test_rank_without_common_group_survives_a_lost_rank(one_of_three):
    pair = posted(one_of_three, 0, 1)
    assert one_of_three.survives(2, DIED)
    assert one_of_three.unnoticed is None
    assert one_of_three.failure_of((0, 1)) is None
    assert not pair.error
    with pytest.raises(PeerLostError, match="rank 2 died"):
        posted(one_of_three, 0, 1, 2)
    posted(one_of_three, 0, 1)


def test_a_rank_without_another_group_fails(one_of_three):
    assert not one_of_three.survives(2, DIED), "no group is used yet: the world counts"
    ProcessGroup(one_of_three, (0,)).run("x", ring.all_reduce(np.ones(3)))
    assert not one_of_three.survives(2, DIED), "a group of one is no reason to go on"
    posted(one_of_three, 0, 2)
    assert not one_of_three.survives(2, DIED)


def test_only_the_groups_of_a_lost_rank_fail(one_of_three):
    lasting, first, second = (posted(one_of_three, *members) for members in ((0, 1), (0, 2), (2, 0)))
    assert one_of_three.survives(2, DIED)
    assert one_of_three.unnoticed is DIED, "until a call has raised it"
    for pending in (first, second):
        with pytest.raises(PeerLostError) as caught:
            one_of_three.wait(pending)
        assert caught.value is DIED
    assert one_of_three.unnoticed is None
    assert one_of_three.under_way() == [lasting]
    assert one_of_three.failure is None
    assert ProcessGroup(one_of_three, (2, 0)).failure is DIED
    assert ProcessGroup(one_of_three, (0, 1)).failure is None


def test_groups_without_the_lost_rank_go_on_after_a_broken_transfer(one_of_three):
    lasting = posted(one_of_three, 0, 1)
    with pytest.raises(PeerLostError) as caught:
        ProcessGroup(one_of_three, (0, 2)).run("x", breaks_while(lambda: one_of_three.survives(2, DIED)))
    assert caught.value is DIED
    assert one_of_three.failure is None
    assert one_of_three.control.told == []
    assert one_of_three.under_way() == [lasting]

    def moves(comm, tag):
        yield ()
        return "moved"

    assert ProcessGroup(one_of_three, (0,)).run("y", moves) == "moved"


def test_check_raises_failures_of_its_group(one_of_three):
    """Nobody waits, who would learn of them from the control connection."""
    posted(one_of_three, 0, 1)
    assert one_of_three.survives(2, DIED)
    ProcessGroup(one_of_three, (0, 1)).check()
    with pytest.raises(PeerLostError, match="rank 2 died"):
        ProcessGroup(one_of_three, (0, 2)).check()
    assert one_of_three.unnoticed is None
    one_of_three.check()
    one_of_three.control.failure = PeerLostError("rank 1 died")
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 1 died"):
            ProcessGroup(one_of_three, (0, 2)).check()
    assert one_of_three.failure is one_of_three.control.failure


def test_no_rank_survives_when_transfers_cannot_outlive_others():
    communicator = LocalWorld(3).communicator(0)
    communicator.outlives_others = False
    engine = Engine(communicator, Agreeing(), Timeouts(), tags=1 << 20)
    posted(engine, 0, 1)
    assert not engine.survives(2, DIED)
