"""A copy that is made while workers train goes on exactly as its original."""

import keras
import msgspec
import numpy as np
import pytest

from tfdist.parameter_server.dealing.deals import DealerService
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.options.synchronization import (
    Asynchronous,
    BoundedStaleness,
    SoftSync,
    Synchronous,
)
from tfdist.parameter_server.protocol.dealing import BeginEpoch, DealtBatch, TakeBatch
from tfdist.parameter_server.protocol.messages import (
    FROM_WORKER,
    AssignValues,
    Attach,
    CompareState,
    CreateShard,
    Decision,
    Done,
    LeaveModel,
    Pull,
    Push,
    Refused,
    StateDiffers,
    Suspend,
    Values,
)
from tfdist.parameter_server.protocol.state import HeldRows, ShardProgress
from tfdist.parameter_server.protocol.tables import AttachTable, ExportTable, Lookup, UpdateRows
from tfdist.parameter_server.server import copies
from tfdist.parameter_server.server.follower import ServerReplica
from tfdist.parameter_server.server.replication_messages import FROM_LEADER, BeginStream, WorkerMessage
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.shard.shard import Shard
from tfdist.parameter_server.tables.tables import Tables
from tfdist.parameter_server.worker.layer_states import digest

HELD = (HeldRows("embedding", 0, 6, 6), HeldRows("bias", 0, 2, 2))
WORKERS = 3


class Pair:
    """A leader and its replica; the leader's answers by worker."""

    def __init__(self, mode, deals=False):
        def make():
            dealt = DealerService(job="job") if deals else None
            made = Shards(lambda model, occurrence: Shard(Ledger(mode, awaited={0, 1, 2})), Tables(), dealt)
            return made

        self.leader = make()
        self.replica = ServerReplica(make, 0)
        self.stream = self.entries = 0
        self.number = 0
        self.answers = {}
        self.begin()

    def begin(self):
        """A new follower gets everything."""
        self.replica.is_whole = False
        self.stream, self.entries = self.stream + 1, 0
        self.append(BeginStream)
        copies.append_all(self.append, self.leader)

    def append(self, kind, *attributes, arrays=()):
        frames = FROM_LEADER.encode(kind(self.stream, self.entries, *attributes), arrays)
        entry, received = FROM_LEADER.decode([bytes(frame) for frame in frames])
        answer = self.replica.take(entry, received)
        assert answer.number == self.entries
        self.entries += 1

    def say(self, worker, kind, *fields, arrays=()):
        self.number += 1
        message = kind(self.number, worker, 1, *fields)
        frames = [bytes(frame) for frame in FROM_WORKER.encode(message, list(arrays))]
        self.answers.pop(worker, None)

        def answer(message, arrays):
            self.answers[worker] = message, [array.copy() for array in arrays]

        self.leader.heard(b"%d" % worker, *FROM_WORKER.decode(frames), answer)
        self.append(WorkerMessage, b"%d" % worker, arrays=[np.frombuffer(frame, np.uint8) for frame in frames])
        return self.answers.get(worker, (None, []))[0]

    def build(self, optimizer):
        config = keras.saving.serialize_keras_object(optimizer)
        values = [np.arange(12, dtype=np.float32).reshape(6, 2), np.zeros(2, np.float32)]
        for worker in range(WORKERS):
            self.say(worker, Attach, "Adam-1")
            self.say(
                worker,
                CreateShard,
                "Adam-1",
                HELD,
                config,
                not worker,
                ((), ()) if not worker else (),
                (),
                arrays=values[: 2 * (not worker)],
            )

    def assert_equal(self):
        """The replica has what the leader has."""
        (key,) = self.leader.models()
        assert self.replica.shards.models() == [key]
        leader, replica = self.leader[key], self.replica.shards[key]
        np.testing.assert_allclose(replica.store.vectors()[0], leader.store.vectors()[0], rtol=1e-6)
        assert replica.store.iterations == leader.store.iterations
        for name in ("version", "awaited", "idle", "workers", "waiting", "round", "done", "counted", "dropped"):
            assert getattr(replica.ledger, name) == getattr(leader.ledger, name), name
        for name in ("incarnations", "sequences", "applied", "assigned"):
            assert getattr(replica, name) == getattr(leader, name), name
        assert replica.tickets.decisions == leader.tickets.decisions
        assert len(replica.pushed) == len(leader.pushed)
        assert self.replica.shards.programs.of == self.leader.programs.of != {}


def train(pair, steps, seed):
    """Random workers push dense or sparse gradients, pull, suspend, and repeat themselves."""
    generator = np.random.default_rng(seed)
    (key,) = pair.leader.models()
    ledger = pair.leader[key].ledger
    for _ in range(steps):
        worker = int(generator.integers(WORKERS))
        action = generator.choice(["push", "push", "push", "again", "suspend", "pull"])
        known = ledger.workers[worker]
        if action == "suspend":
            pair.say(worker, Suspend, bool(generator.integers(2)))
        elif action == "pull":
            pair.say(worker, Pull)
        elif action == "again" or ledger.may_read(worker):  # a worker that waits does not push
            sequence = known.sequence + (action == "push")
            if sequence < 0:
                continue
            dense = generator.normal(size=2).astype(np.float32)
            rows = generator.normal(size=(2, 2)).astype(np.float32)
            arrays = [dense, rows, generator.integers(0, 6, 2)]
            push = sequence, known.clock, ledger.version, 4.0, ("sparse", "dense")
            pair.say(worker, Push, *push, arrays=arrays)


@pytest.mark.parametrize(
    "mode", [Asynchronous(), BoundedStaleness(1), SoftSync(1), Synchronous(), Synchronous(backup_workers=1)], ids=str
)
@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.SGD(0.1, momentum=0.9), keras.optimizers.Adam(0.1)], ids=["sgd", "adam"]
)
def test_replica_state_equals_the_leaders_after_each_copy(mode, optimizer):
    pair = Pair(mode)
    pair.build(optimizer)
    for seed in range(4):
        train(pair, 25, seed)
        pair.assert_equal()
        pair.begin()
        pair.assert_equal()
    (key,) = pair.leader.models()
    assert pair.leader[key].ledger.version > 5


def test_workers_go_on_with_the_replica():
    """Over new connections, and what was not answered is repeated."""
    pair = Pair(Synchronous())
    pair.build(keras.optimizers.SGD(1.0))
    gradient = [np.ones(14, np.float32)]
    for worker in range(WORKERS):
        assert not isinstance(pair.say(worker, Push, 0, 0, 0, 1.0, arrays=gradient), Refused)
    assert not isinstance(pair.say(0, Push, 1, 1, 1, 1.0, arrays=gradient), Values), "it waits for the others"
    answers = []

    def ask(worker, kind, *fields, arrays=()):
        message = kind(1000, worker, 1, *fields)
        pair.replica.shards.heard(b"new %d" % worker, message, list(arrays), lambda *answer: answers.append(answer))
        return answers[-1][0]

    assert ask(0, Pull).is_unknown
    for worker in range(WORKERS):
        assert ask(worker, Attach, "Adam-1").clock == 1 + (not worker)
        ask(worker, Push, 1, 1, 1, 1.0, arrays=gradient)
    values = [arrays[0] for message, arrays in answers if isinstance(message, Values)]
    assert len(values) == 3, "all are answered, as the third push completes the round"
    (key,) = pair.replica.shards.models()
    np.testing.assert_array_equal(values[0][-2:], [-2, -2])
    assert pair.replica.shards[key].ledger.version == 2


def test_copy_contains_assignments():
    """After it, too, `fit` ends with what was assigned and not with averages, and a repeated `Put` counts once."""
    pair = Pair(Asynchronous())
    pair.build(keras.optimizers.SGD(1.0, use_ema=True))
    gradient = [np.ones(14, np.float32)]
    pair.say(1, Push, 0, 0, 0, 1.0, (), arrays=gradient)
    pair.say(0, AssignValues, arrays=[np.full(14, 3, np.float32)])
    repeated = AssignValues(pair.number, 0, 1)
    pair.begin()
    pair.assert_equal()
    (key,) = pair.leader.models()
    answers, replica = [], pair.replica.shards[key]

    def ask(message, arrays=()):
        replica.heard(message, list(arrays), lambda *answer: answers.append(answer))
        return answers[-1][1]

    np.testing.assert_array_equal(ask(Pull(1000, 1, 1, "final"))[0], np.full(14, 3))
    ask(Push(1001, 1, 1, 1, 1, 1, 1.0), gradient)
    ask(repeated, [np.full(14, 3, np.float32)])
    np.testing.assert_array_equal(ask(Pull(1002, 1, 1))[0], np.full(14, 2))


def test_finished_model_stays_finished_in_a_copy():
    pair = Pair(Asynchronous())
    pair.build(keras.optimizers.SGD(1.0))
    for worker in range(WORKERS):
        pair.say(worker, LeaveModel, True)
    pair.begin()
    assert pair.leader.models() == pair.replica.shards.models() == []
    assert pair.replica.shards.over == pair.leader.over != set()


def test_outstanding_batches_are_dealt_again_after_a_copy():
    """By the leader, too: tickets from before a copy are void, and those from afterwards are equal."""
    pair = Pair(Asynchronous(), deals=True)
    pair.build(keras.optimizers.SGD(1.0))
    plan = 0, 0, 6, 2, None
    pair.say(1, BeginEpoch, *plan)
    before = pair.say(1, TakeBatch, 0, 0, 0)
    pair.begin()
    assert pair.say(1, TakeBatch, 0, 0, 1).is_unknown
    for worker in (1, 2):
        pair.say(worker, BeginEpoch, *plan)
    dealt = [pair.say(worker, TakeBatch, 0, 0, request) for request, worker in enumerate((1, 2, 1), 2)]
    assert isinstance(before, DealtBatch)
    assert sorted(batch.start for batch in dealt) == [0, 2, 4]
    gradient = [np.ones(14, np.float32)]
    late = pair.say(1, Push, 0, 0, 0, 1.0, (), None, before.ticket, arrays=gradient)
    assert late.is_refused
    for sequence, (worker, batch) in enumerate(zip((1, 2, 1), dealt, strict=True), 1):
        done = pair.say(worker, Push, sequence, 0, 0, 1.0, (), None, batch.ticket, arrays=gradient)
        assert isinstance(done, Values)
        assert not done.is_refused
    pair.assert_equal()
    assert pair.leader.deals.state(()) == pair.replica.shards.deals.state(())
    (key,) = pair.leader.models()
    assert pair.leader[key].ledger.version == 3


def test_copy_contains_the_chiefs_weights():
    pair, given = Pair(Asynchronous()), ("digest", 0, 0, ("a",), (digest(np.ones(3)),))
    pair.say(0, CompareState, *given)
    pair.say(0, CompareState, *given, (0,), arrays=[np.ones(3)])
    pair.begin()
    answers = []
    asked = CompareState(9, 1, 1, *given[:-1], (digest(np.zeros(3)),))
    pair.replica.shards.heard(b"1", asked, [], lambda *answer: answers.append(answer))
    ((answer, (array,)),) = answers
    assert answer == StateDiffers(9, (0,))
    np.testing.assert_array_equal(array, np.ones(3))


def test_copy_contains_tables_and_counted_updates():
    pair = Pair(Asynchronous())
    sgd = keras.optimizers.serialize(keras.optimizers.Adam(0.1))
    pair.say(1, AttachTable, "users", 2, "float32", InitialRows(), RowPolicy(), sgd)
    keys = np.array([5, -3, 2**40], np.int64)
    for sequence in range(4):
        if sequence == 2:
            pair.begin()
        pair.say(1, Lookup, "users", sequence, True, arrays=[keys])
        rows = np.full((3, 2), sequence + 1, np.float32)
        assert isinstance(pair.say(1, UpdateRows, "users", sequence, None, arrays=[keys, rows]), Done)
    answers = []
    again = UpdateRows(99, 1, 1, "users", 3, None)
    pair.replica.shards.tables.heard(again, [keys, rows], lambda *answer: answers.append(answer))
    assert isinstance(answers[0][0], Done), "it knows the worker, and the update counts once"
    pair.say(1, ExportTable, "users")
    expected = pair.answers[1][1]
    pair.replica.shards.tables.heard(ExportTable(100, 1, 1, "users"), [], lambda *answer: answers.append(answer))
    for array, other in zip(answers[-1][1], expected, strict=True):
        np.testing.assert_array_equal(array, other)


def test_copy_of_a_ledger_contains_every_field():
    """Whatever a ledger has is copied."""
    fields = {*Ledger.__dataclass_fields__} - {"synchronization", "waiting"}
    copied = {field.name for kind in (copies.LedgerState, ShardProgress) for field in msgspec.structs.fields(kind)}
    assert copied - {"applied", "assigned"} == fields


def test_rounds_decided_by_another_server_survive_a_copy():
    """A push that comes late to one of them does not wait for its peers."""
    pair = Pair(Synchronous())
    pair.build(keras.optimizers.SGD(1.0))
    (key,) = pair.leader.models()
    decision = Decision(1, 1.0, (0, 0), (0, 1))
    for worker in (0, 1):
        push = 0, 0, 0, 1.0, (), None, decision
        pair.say(worker, Push, *push, arrays=[np.ones(14, np.float32)])
    assert list(pair.leader[key].ledger.done) == [(0, 0)]
    pair.begin()
    pair.assert_equal()
    pair.say(2, Push, *push, arrays=[np.ones(14, np.float32)])
    assert pair.leader[key].ledger.version == 2
    pair.assert_equal()
