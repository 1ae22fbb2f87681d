"""A worker's client of a table: over real connections to several servers, and in its own process."""

import contextlib
import functools
import time

import keras
import numpy as np
import pytest

from tests.parameter_server.serving import DEADLINE, connected, serving
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.key_hash import server_of
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.tables import ExportTable
from tfdist.parameter_server.tables.client import InProcess, TableClient, TableConnections, TableSpec
from tfdist.parameter_server.tables.row_cache import CachePolicy
from tfdist.parameter_server.tables.snapshots import TableSnapshots
from tfdist.parameter_server.tables.tables import Tables
from tfdist.parameter_server.worker.client import MessageRefusedError

DIM = 3
FORM = TableSpec(DIM, InitialRows(seed=4), RowPolicy())
ADAGRAD = keras.optimizers.serialize(keras.optimizers.Adagrad(0.1))
KEYS = np.arange(-20, 20, dtype=np.int64) ** 5


def gradients(keys, seed=0):
    return np.random.default_rng(seed).normal(size=(len(keys), DIM)).astype(np.float32)


def of_process(form=FORM):
    return TableClient(TableConnections([InProcess()]), "users", form)


@contextlib.contextmanager
def on_servers(count=2, workers=1, form=FORM, cache=None):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(serving()) for _ in range(count)]
        yield [
            TableClient(
                TableConnections([stack.enter_context(connected(server)) for server in servers], worker),
                "users",
                form,
                cache,
            )
            for worker in range(workers)
        ]


def train(table, steps=4):
    table.set_optimizer(ADAGRAD)
    for seed in range(steps) if isinstance(steps, int) else steps:
        keys = np.random.default_rng(seed).permutation(KEYS)[:15]
        table.lookup(keys, create=True)
        table.update(keys, gradients(keys, seed))
    return table.export()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_servers_return_the_rows_of_a_single_process(count):
    keys, rows = train(of_process())
    with on_servers(count) as (table,):
        server_keys, values = train(table)
        np.testing.assert_array_equal(server_keys, keys)
        np.testing.assert_allclose(values, rows, rtol=1e-6)
        order = np.random.default_rng(9).permutation(len(keys))
        np.testing.assert_array_equal(table.lookup(keys[order], create=False), values[order])


def test_each_row_is_on_one_server():
    assert {0, 1} == set(server_of(KEYS, 2)), "both have keys"
    with on_servers() as (table,):
        table.lookup(KEYS, create=True)
        keys, _ = table.export()
        np.testing.assert_array_equal(keys, np.sort(KEYS))
        held = [len(answer[1][0]) for answer in table._asked([[], []], ExportTable)]
        assert sum(held) == len(KEYS)
        assert min(held) > 0


def test_all_workers_updates_count():
    sgd = keras.optimizers.serialize(keras.optimizers.SGD(1.0))
    with on_servers(workers=2) as tables:
        for table in tables:
            table.set_optimizer(sgd)
        before = tables[0].lookup(KEYS, create=True)
        for table in (*tables, tables[1]):
            table.update(KEYS, np.ones((len(KEYS), DIM), np.float32))
        np.testing.assert_allclose(tables[0].lookup(KEYS, create=False), before - 3, rtol=1e-6)


def test_a_lookup_before_the_optimizer_is_known_makes_rows_too():
    table = of_process()
    before = table.lookup(KEYS, create=True)
    table.set_optimizer(keras.optimizers.serialize(keras.optimizers.SGD(1.0)))
    table.update(KEYS, np.ones((len(KEYS), DIM), np.float32))
    np.testing.assert_allclose(table.export()[1], (before - 1)[np.argsort(KEYS)], rtol=1e-6)


def test_a_server_that_was_started_again_is_told_of_the_table_again():
    with serving() as first, connected(first) as connection:
        table = TableClient(TableConnections([connection]), "users", FORM)
        train(table)
        first._shards.tables = Tables()  # as after a start
        table.lookup(KEYS, create=True)
        table.update(KEYS, gradients(KEYS))
        assert len(table.export()[0]) == len(KEYS)


def test_a_server_goes_on_from_its_snapshot(tmp_path):
    expected = train(of_process(), steps=8)
    make = functools.partial(TableSnapshots, tmp_path, server=0, servers=1, seconds=60)
    with contextlib.ExitStack() as stack:
        with serving(tables=Tables(make)) as first:
            table = TableClient(TableConnections([stack.enter_context(connected(first))]), "users", FORM)
            train(table)
        with serving(address=first.address, tables=Tables(make)):
            for actual, array in zip(train(table, steps=range(4, 8)), expected, strict=True):
                np.testing.assert_allclose(actual, array, rtol=1e-6)


def test_snapshots_are_taken_while_the_server_runs(tmp_path):
    make = functools.partial(TableSnapshots, tmp_path, server=0, servers=1, seconds=0.05)
    with serving(tables=Tables(make)) as server, connected(server) as connection:
        table = TableClient(TableConnections([connection]), "users", FORM)
        keys, _ = train(table)
        end = time.monotonic() + DEADLINE
        while (snapshot := make("users").find()) is None or len(snapshot.states[0]["keys"]) < len(keys):
            assert time.monotonic() < end
            time.sleep(0.02)


def test_a_refusal_is_raised_and_kept():
    line = TableConnections([InProcess()])
    table = TableClient(line, "users", FORM)
    with pytest.raises(MessageRefusedError, match="by which optimizer") as raised:
        table.update(KEYS, gradients(KEYS))
    assert line.failure is raised.value
    with pytest.raises(MessageRefusedError, match="dim 3"):
        TableClient(line, "users", TableSpec(4, FORM.initial, FORM.policy)).export()


def test_only_the_chief_loads_rows():
    with on_servers(workers=2) as (chief, worker):
        worker.assign(KEYS, gradients(KEYS))
        assert not len(chief.export()[0])
        chief.assign(KEYS, gradients(KEYS))
        np.testing.assert_array_equal(worker.lookup(KEYS, create=False), gradients(KEYS))


def test_first_values_are_ignored_once_others_have_trained():
    with on_servers(workers=2) as (chief, worker):
        train(worker)
        keys, rows = worker.export()
        chief.assign(KEYS, gradients(KEYS))
        np.testing.assert_array_equal(chief.export()[1], rows)
        train(chief, steps=1)
        chief.assign(keys, 2 * rows)
        np.testing.assert_array_equal(worker.export()[1], 2 * rows)


ADAM = keras.optimizers.serialize(keras.optimizers.Adam(0.1))


def train_often(table, steps=20):
    """Keys that come often and seldom, some twice in a step. What is looked up is returned, too."""
    table.set_optimizer(ADAM)
    generator, seen = np.random.default_rng(2), []
    for step in range(steps):
        keys = np.unique(KEYS[np.minimum(generator.geometric(0.15, 12) - 1, len(KEYS) - 1)])
        seen.append(table.lookup(keys, create=True))
        pushed = keys[[0, *range(len(keys))]]
        table.update(pushed, gradients(pushed, step))
    return seen, table.export()


@pytest.mark.parametrize("rows", [100, 8])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_cached_rows_equal_the_servers_rows(rows, staleness):
    """Bit for bit, whatever the staleness: nobody else updates them."""
    with on_servers() as (table,):
        seen, expected = train_often(table)
    with on_servers(cache=CachePolicy(rows, staleness)) as (table,):
        cached, exported = train_often(table)
        for array, other in zip([*cached, *exported], [*seen, *expected], strict=True):
            np.testing.assert_array_equal(array, other)
        if not staleness:
            assert table.cache is None
        else:
            assert 0.1 < table.cache.found / table.cache.asked < 0.9


def test_others_updates_are_seen_when_a_row_is_stale():
    """And at once in `evaluate` and `predict`, which use no keys."""
    gradient = np.ones((1, DIM), np.float32)
    key = KEYS[:1]
    with on_servers(workers=2, cache=CachePolicy(10, 2)) as (table, other):
        for worker in (table, other):
            worker.set_optimizer(keras.optimizers.serialize(keras.optimizers.SGD(1.0)))
        for _ in range(2):
            before = table.lookup(key, create=True)
            table.update(key, 0 * gradient)
        other.update(key, gradient)
        np.testing.assert_array_equal(table.lookup(key, create=False), before - 1)
        for _ in range(2):
            np.testing.assert_array_equal(table.lookup(key, create=True), before)
            table.update(KEYS[1:2], gradient)
        np.testing.assert_array_equal(table.lookup(key, create=True), before - 1)
        other.update(key, gradient)
        table.update(key, gradient)
        row = table.lookup(key, create=True)
        np.testing.assert_allclose(row, before - 3, rtol=1e-5, err_msg="one's own come with others'")


def test_own_updates_appear_late_without_reads_own_writes():
    gradient = np.ones((1, DIM), np.float32)
    key = KEYS[:1]
    with on_servers(cache=CachePolicy(10, 2, reads_own_writes=False)) as (table,):
        table.set_optimizer(keras.optimizers.serialize(keras.optimizers.SGD(1.0)))
        seen = []
        for _ in range(8):
            seen.append(table.lookup(key, create=True)[0, 0])
            table.update(key, gradient)
        np.testing.assert_allclose(seen[0] - np.array(seen), [0, 1, 1, 1, 4, 4, 4, 7], rtol=1e-5)


def test_rows_that_the_chief_loads_are_used_at_once():
    with on_servers(cache=CachePolicy(10, 5)) as (table,):
        train_often(table)
        keys = table.export()[0]
        table.assign(keys, gradients(keys))
        np.testing.assert_array_equal(table.lookup(keys, create=True), gradients(keys))
