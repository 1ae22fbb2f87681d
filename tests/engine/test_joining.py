import json
import threading

import ml_dtypes
import numpy as np
import pytest

from tests.cluster.serving import DEADLINE, connected, serving
from tests.collectives.simulation import simulate
from tfdist.cluster.settings import Timeouts
from tfdist.collectives import ring
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.barrier import barrier
from tfdist.comm.local import LocalWorld
from tfdist.engine import joining
from tfdist.engine.engine import Engine
from tfdist.engine.joining import Attendance
from tfdist.engine.pending import Pending


def told(description):
    """As another process gets it."""
    return json.loads(json.dumps(description))


@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"mpi"}))
@pytest.mark.parametrize("dtype", ["int8", "float32", ml_dtypes.bfloat16])
def test_who_stands_in_for_a_sum_adds_nothing(algorithm, dtype):
    stand_in = told(joining.sum_of(11, np.dtype(dtype), algorithm))
    buffers = [np.arange(11).astype(dtype) for _ in range(3)]

    def plan(rank):
        return joining.plan_of(stand_in) if rank == 1 else ALGORITHMS[algorithm](buffers[rank])

    simulate(3, plan)
    for rank in (0, 2):
        np.testing.assert_array_equal(buffers[rank].astype(int), 2 * np.arange(11))


@pytest.mark.parametrize("shape", [(), (2,), (3, 0)])
def test_who_stands_in_for_a_gather_gives_no_rows(shape):
    rows = np.ones((4, *shape), np.int16)
    stand_in = told(joining.rows_of(shape, rows.dtype))
    results, _ = simulate(2, lambda rank: joining.plan_of(stand_in) if rank else all_gather_rows(rows))
    for gathered, counts in results:
        assert gathered.shape == rows.shape
        assert counts.tolist() == [4, 0]


def test_who_stands_in_comes_to_a_barrier():
    stand_in = told(joining.everyone_comes())
    simulate(3, lambda rank: joining.plan_of(stand_in) if rank else barrier())


class Connection:
    """Keeps what is sent."""

    def __init__(self, joined):
        self.joined, self.failure, self.sent = joined, None, []

    def attend(self, listener):
        pass

    def send(self, message):
        self.sent.append(message)


def invited(rank, joined, number=4, call=2, members=None, stand_in=joining.everyone_comes()):  # noqa: B008
    """Whom a rank invites to a call of its own, among four."""
    control = Connection(joined)
    engine = Engine(LocalWorld(4).communicator(rank), control, Timeouts())
    pending = Pending("sum", members)
    pending.number, pending.call = number, call
    Attendance(engine).invite(pending.describe(), stand_in)
    for message in control.sent:
        assert (message["type"], message["key"], message["call"]) == ("invite", "sum", call)
        assert message["stand_in"] == stand_in
    return [message["to"] for message in control.sent]


def test_the_lowest_rank_that_has_data_invites():
    assert invited(0, {1: {}, 3: {}}) == [[1, 3]]
    assert invited(2, {1: {}, 3: {}}) == []
    assert invited(1, {0: {}}) == [[0]]
    assert invited(2, {0: {}}) == []


def test_who_took_part_before_joining_is_not_invited():
    assert invited(0, {1: {"4": 3}, 2: {"4": 2}, 3: {"7": 9}}) == [[2, 3]]
    assert invited(0, {1: {"4": 3}}) == []


def test_members_only_are_invited_and_invite():
    assert invited(2, {3: {}, 1: {}}, members=(2, 3)) == [[3]]
    assert invited(0, {3: {}}, members=(0, 2)) == []


def test_nobody_is_invited_to_what_nobody_can_stand_in_for():
    assert invited(0, {1: {}}, stand_in=None) == []
    assert invited(0, {}) == []
    assert invited(0, {1: {}}, number=None) == [], "the ranks are agreeing on it"


def test_alone():
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
        assert message["type"] == "join"
        for call in self.calls:
            self.listener.invited(
                {"key": "all", "number": 4, "call": call, "members": None, "stand_in": joining.everyone_comes()}
            )
        self.listener.all_joined(0)


@pytest.mark.parametrize("calls", [[0, 1, 2], [2, 1, 0], [1, 0, 2, 0, 1], [2, 0, 1]])
def test_invitations_are_followed_once_and_in_the_order_of_the_calls(calls):
    """They come over the server, from ranks that are not equally far."""
    engine = Engine(LocalWorld(1).communicator(0), Inviting(calls), Timeouts())
    assert engine.join() == 0
    assert engine.counts() == {"4": 3}
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
    """Through a real server: rank r has 3 r + 2 batches, and the key of the last ones is known to nobody before."""

    def work(rank, engine):
        sums = []
        for batch in range(3 * rank + 2):
            buffer = np.full(5, 2.0**rank, np.float32)
            key = "sum" if batch < 4 else "later sum"
            stand_in = joining.sum_of(5, buffer.dtype, "ring")
            engine.run(key, ring.all_reduce(buffer), stand_in=stand_in)
            sums.append(float(buffer[0]))
        return sums, engine.join()

    found = on_all(engines, work)
    expected = [7.0] * 2 + [6.0] * 3 + [4.0] * 3
    assert [sums for sums, _ in found] == [expected[:2], expected[:5], expected]
    assert [last for _, last in found] == [2, 2, 2]


def test_ranks_can_join_again(engines):
    def work(rank, engine):
        last = []
        for epoch in range(2):
            for _ in range(1 + (rank == epoch)):
                buffer = np.ones(3)
                engine.run("sum", ring.all_reduce(buffer), stand_in=joining.sum_of(3, buffer.dtype, "ring"))
            last.append((engine.join(), buffer[0]))
        return last

    found = on_all(engines, work)
    assert [[epoch[0] for epoch in ranks] for ranks in found] == [[0, 1]] * 3
    assert found[0][0][1] == found[1][1][1] == 1.0, "in their additional batch the others stand in"
