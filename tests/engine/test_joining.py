import threading

import numpy as np
import pytest

from tests.cluster.serving import DEADLINE, connected, serving
from tfdist.cluster.messages import CollectiveCall, Invited, Join, StandIn
from tfdist.cluster.settings import Timeouts
from tfdist.collectives.broadcast import broadcast
from tfdist.comm.local import LocalWorld
from tfdist.engine import operations
from tfdist.engine.engine import Engine
from tfdist.engine.joining import JoinCoordinator
from tfdist.engine.operations import Operation
from tfdist.engine.pending import Pending
from tfdist.errors import PeerLostError, TfdistError

BARRIER = StandIn("barrier")


class Connection:
    """Records sent messages."""

    def __init__(self, joined):
        self.joined, self.failure, self.sent = joined, None, []

    def attend(self, listener):
        pass

    def send(self, message):
        self.sent.append(message)


def invited(rank, joined, number=4, call=2, members=None, stand_in=BARRIER):
    """The ranks that a rank invites to its call, among four."""
    control = Connection(joined)
    engine = Engine(LocalWorld(4).communicator(rank), control, Timeouts())
    pending = Pending("sum", members)
    pending.number, pending.call, pending.operation = number, call, Operation(None, stand_in)
    JoinCoordinator(engine).invite(pending.describe(), stand_in)
    for message in control.sent:
        assert (message.call.key, message.call.call, message.stand_in) == ("sum", call, stand_in)
    return [message.to for message in control.sent]


def test_the_lowest_rank_that_has_data_invites():
    assert invited(0, {1: {}, 3: {}}) == [(1, 3)]
    assert invited(2, {1: {}, 3: {}}) == []
    assert invited(1, {0: {}}) == [(0,)]
    assert invited(2, {0: {}}) == []


def test_rank_that_made_the_call_before_joining_is_not_invited():
    assert invited(0, {1: {4: 3}, 2: {4: 2}, 3: {7: 9}}) == [(2, 3)]
    assert invited(0, {1: {4: 3}}) == []


def test_members_only_are_invited_and_invite():
    assert invited(2, {3: {}, 1: {}}, members=(2, 3)) == [(3,)]
    assert invited(0, {3: {}}, members=(0, 2)) == []


def test_calls_without_stand_in_invite_no_ranks():
    assert invited(0, {1: {}}, stand_in=None) == []
    assert invited(0, {}) == []
    assert invited(0, {1: {}}, number=None) == [], "the ranks are agreeing on it"


def test_join_of_a_single_process_returns_zero():
    assert Engine(LocalWorld(1).communicator(0), None, Timeouts()).join() == 0


class Inviting(Connection):
    """Invites to calls in the order given, some of them twice, as soon as the rank has joined."""

    def __init__(self, calls):
        super().__init__({})
        self.calls = calls

    def attend(self, listener):
        self.listener = listener

    def send(self, message):
        super().send(message)
        assert isinstance(message, Join)
        for call in self.calls:
            self.listener.invited(Invited(CollectiveCall("all", 4, call, None), BARRIER))
        self.listener.all_joined(0, {})


@pytest.mark.parametrize("calls", [[0, 1, 2], [2, 1, 0], [1, 0, 2, 0, 1], [2, 0, 1]])
def test_invitations_are_followed_once_and_in_the_order_of_the_calls(calls):
    """They arrive through the server, from ranks at different steps."""
    engine = Engine(LocalWorld(1).communicator(0), Inviting(calls), Timeouts())
    assert engine.join() == 0
    assert engine.numbers.counts() == {4: 3}
    assert engine.under_way() == []


@pytest.fixture
def engines():
    with serving(3) as server, connected(server.address, 3) as controls:
        world = LocalWorld(3)
        made = [Engine(world.communicator(rank), controls[rank], Timeouts(collective=DEADLINE)) for rank in range(3)]
        yield made
        for engine in made:
            engine.close()


def on_all(engines, work):
    results = {}

    def run(rank):
        try:
            results[rank] = work(rank, engines[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
        assert not thread.is_alive()
    return [results[rank] for rank in range(len(engines))]


def test_ranks_with_fewer_batches_stand_in_until_all_have_joined(engines):
    """Through a real server: rank r has 3 r + 2 batches, and the key of the last ones is new to all ranks."""

    def work(rank, engine):
        sums = []
        for batch in range(3 * rank + 2):
            buffer = np.full(5, 2.0**rank, np.float32)
            key = "sum" if batch < 4 else "later sum"
            engine.run(key, operations.all_reduce(buffer, "ring"))
            sums.append(float(buffer[0]))
        return sums, engine.join()

    results = on_all(engines, work)
    expected = [7.0] * 2 + [6.0] * 3 + [4.0] * 3
    assert [sums for sums, _ in results] == [expected[:2], expected[:5], expected]
    assert [last for _, last in results] == [2, 2, 2]


def test_ranks_can_join_again(engines):
    def work(rank, engine):
        last = []
        for epoch in range(2):
            for _ in range(1 + (rank == epoch)):
                buffer = np.ones(3)
                engine.run("sum", operations.all_reduce(buffer, "ring"))
            last.append((engine.join(), buffer[0]))
        return last

    results = on_all(engines, work)
    assert [[epoch[0] for epoch in ranks] for ranks in results] == [[0, 1]] * 3
    assert results[0][0][1] == results[1][1][1] == 1.0, "in their additional batch the others stand in"


def send_from_rank_zero(engine):
    engine.run("broadcast", broadcast(np.ones(1)), members=(0, 1))


def test_what_cannot_run_without_a_rank_is_refused_once_it_has_joined(engines):
    joined = threading.Event()

    def work(rank, engine):
        if rank == 2:
            return None
        send_from_rank_zero(engine)
        if rank == 1:
            with pytest.raises(TfdistError):
                engine.join()  # rank 2 does not join
            return None
        while not engine.control.joined:
            assert not joined.wait(0.001)
        with pytest.raises(PeerLostError, match=r"rank 0 calls a first one .*, but rank 1 has called join\(\)"):
            engine.run("a first one", broadcast(np.ones(1)), members=(0, 1))
        with pytest.raises(PeerLostError, match=r"rank 0 calls broadcast .*, but rank 1 has called join\(\)") as error:
            send_from_rank_zero(engine)
        engine.fail(error.value)
        return engine.numbers.posted(((0, 1), "broadcast"))

    assert on_all(engines, work)[0] == 1, "the call has not begun"


class EndsAtOnce(Connection):
    """All others have joined before."""

    def attend(self, listener):
        self.listener = listener

    def send(self, message):
        self.listener.all_joined(1, {4: 2, 5: 1, 6: 3, -1: 9})


def test_calls_that_a_rank_missed_when_it_joined_are_noticed_at_the_end():
    """The root of a small broadcast may have ended it before it hears that another rank has joined."""
    engine = Engine(LocalWorld(2).communicator(0), EndsAtOnce({}), Timeouts())
    for key, number in (("broadcast", 4), ("sum", 5)):
        engine.numbers.take((None, key), number)
        engine.numbers.begin((None, key))
    engine.numbers.take(((0,), "of its own"), -1)
    with pytest.raises(PeerLostError, match=r"rank 0 has called join\(\), and others have called broadcast since"):
        engine.join()
    engine.numbers.begin((None, "broadcast"))
    assert engine.join() == 1, "6 is of a group without this rank"
