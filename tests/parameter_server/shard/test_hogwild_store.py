import os

import numpy as np
import pytest

from tfdist.parameter_server import Asynchronous
from tfdist.parameter_server.protocol.gradients import PushedGradients
from tfdist.parameter_server.protocol.hogwild_memory import PLACES, Memory, Writer
from tfdist.parameter_server.protocol.state import HeldRows, TrainingState
from tfdist.parameter_server.shard.hogwild_store import MemoryStore
from tfdist.parameter_server.shard.ledger import Ledger

HELD = (HeldRows("w", 0, 4, 4), HeldRows("b", 0, 1, 1))


def made(scalars=None):
    state = TrainingState(
        [np.arange(8, dtype=np.float32).reshape(4, 2), np.array(1.0, np.float32)], scalars=scalars or {}
    )
    return MemoryStore(HELD, state, {})


def writer_of(store, worker):
    memory = Memory.open(store.where, store.shapes)
    return Writer(memory, store.opened(worker)[1])


def test_workers_writes_change_the_servers_values():
    store = made()
    before = store.edition
    writer = writer_of(store, 3)
    writer.add_rows(0, np.array([2]), np.full((1, 2), 10, np.float32))
    writer.count()
    (vector,) = store.vectors()
    np.testing.assert_array_equal(vector, [0, 1, 2, 3, 14, 15, 6, 7, 1])
    assert store.iterations == 1
    assert store.edition != before
    (vector,) = store.since(before, (0,)).vectors
    vector[:] = 0
    assert store.state().values[1] == 1, "what is returned is a copy"


def test_pushes_of_other_machines_are_added():
    store = made()
    writer = writer_of(store, 0)
    store.update(PushedGradients(("dense", "dense"), [np.full(9, -1, np.float32)]))
    sparse = {0: (np.full((3, 2), -1, np.float32), np.array([1, 1, 2]))}
    store.update(PushedGradients(("sparse", "dense"), [np.zeros(1, np.float32)], sparse))
    np.testing.assert_array_equal(store.vectors()[0], [1, 2, 5, 6, 6, 7, 7, 8, 2])
    assert store.iterations == 2
    assert writer.changed_by_others([0]) == {0: None}


def test_assigned_values_are_reported_as_changed():
    store = made()
    writer, before = writer_of(store, 0), store.edition
    store.assign([np.ones(9, np.float32)])
    assert store.edition != before
    assert writer.changed_by_others([0, 1]) == {0: None, 1: None}
    with pytest.raises(ValueError, match="expected"):
        store.assign([np.ones(8, np.float32)])


def test_updates_are_counted_once():
    store, ledger = made(), Ledger(Asynchronous())
    ledger.enter(7)
    writers = [writer_of(store, worker) for worker in (7, 9)]
    for writer, times in zip(writers, (3, 2), strict=True):
        writer.changed_by_others([])
        for _ in range(times):
            writer.count()
    store.settle(ledger)
    store.settle(ledger)
    assert (ledger.version, dict(ledger.counted)) == (5, {7: 3, 9: 2})
    assert ledger.workers[7].clock == 3
    assert dict(ledger.staleness) == {0: 2, 1: 2, 2: 1}
    writers[0].count()
    store.settle(ledger)
    assert (ledger.version, ledger.counted[7]) == (6, 4)


def test_store_is_restored_from_its_state():
    store = made()
    writer_of(store, 0).count()
    state = store.state()
    again = MemoryStore(HELD, state, {})
    assert again.iterations == 1
    np.testing.assert_array_equal(again.vectors()[0], store.vectors()[0])
    assert again.where.token != store.where.token


def test_too_many_workers_raise():
    store = made()
    assert store.opened(1000) == store.opened(1000) == (store.where, 1)
    assert len({store.opened(worker)[1] for worker in range(PLACES - 2)}) == PLACES - 2
    with pytest.raises(ValueError, match=f"room for {PLACES - 1} workers"):
        store.opened(5000)


def test_memory_file_is_closed_with_the_store():
    store = made()
    opened = store.where.opened
    os.fstat(opened)
    del store
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(opened)
