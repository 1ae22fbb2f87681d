"""Entries of a log arrive as they were sent, and others do not decode."""

import numpy as np
import pytest

from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.messages import Attach, CompareState, Decision
from tfdist.parameter_server.protocol.programs import Program
from tfdist.parameter_server.protocol.state import HeldRows, ShardProgress
from tfdist.parameter_server.protocol.tables import AttachTable
from tfdist.parameter_server.protocol.wire import InvalidMessageError
from tfdist.parameter_server.server import replication_messages as m
from tfdist.parameter_server.shard.ledger import Gradient, Worker

OF = 2**62, 3
KEY = "Adam-1", 0
WORKERS = {0: Worker(4, (1, 2), 7, True)}
PROGRESS = ShardProgress(9, {0: 8}, ((0, 5, 6),), 9)
LEDGER = m.LedgerState((1,), (2,), WORKERS, (1, 2), ((1, 1),), {0: 1}, {0: 8})
WAITING = m.PendingGradients(Gradient(0, 7, (1, 2), 32.0, 1, 1.0, (0, 1)), 5, 8, None, ("dense", "sparse", "none"))
HELD = (HeldRows("w", 0, 3, 3, True, {"class_name": "NonNeg"}),)
GIVEN = CompareState(1, 0, 5, "digest", 0, 0, ("a",), (b"a",), (0,))
TABLE = AttachTable(1, 0, 5, "users", 2, "float32", InitialRows(), RowPolicy(), {"class_name": "SGD", "config": {}})
ENTRIES = [
    m.BeginStream(*OF),
    m.StateComplete(*OF),
    m.WorkerMessage(*OF, b"\0peer"),
    m.WorkerLost(*OF, 4),
    m.TaskArrived(*OF, 4),
    m.ShardCopy(
        *(*OF, *KEY, HELD, {"class_name": "Adam", "config": {"epsilon": float("inf")}}, (("momentum",),)),
        *(("iteration",), PROGRESS, LEDGER, {0: 5}, ((0, 5, 7),), {0: (7, Decision(4, 1.0))}),
        *({0: (5, 3)}, (WAITING,)),
    ),
    m.ProgramsCopy(
        *(*OF, ((b"\0peer", 0, KEY),), {0: Program(5, True, {0: Attach(1, 0, 5, "Adam-1")})}, ((KEY, (1,)),)),
        *((KEY,), (2,)),
    ),
    m.StatesCopy(*OF, {0: Program(5, False, {0: GIVEN})}, ((KEY, (b"a",)),), (b"a",)),
    m.TableCopy(*OF, TABLE, None, ("keys",), ((0, 5, 1, 2),), ((0, 5, 2),)),
    m.DealsCopy(*OF, {"job": "a", "dealer": {"epochs": [], "newest": None, "committed": []}}, 2**60),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_entries_arrive_as_they_were_sent(entry):
    array = np.arange(3, dtype=np.uint8)
    decoded, (received,) = m.FROM_LEADER.decode(m.FROM_LEADER.encode(entry, [array]))
    assert decoded == entry
    np.testing.assert_array_equal(received, array)


def test_a_workers_message_is_no_entry():
    with pytest.raises(InvalidMessageError):
        m.FROM_LEADER.decode(m.FROM_LEADER.encode(Attach(1, 0, 5, "Adam-1")))


def test_answers_arrive_as_they_were_sent():
    answer = m.Acknowledged(*OF)
    assert m.FROM_FOLLOWER.decode(m.FROM_FOLLOWER.encode(answer)) == (answer, [])
