"""Embeddings on parameter servers beside all-reduce: ranks and servers are threads of this process."""

import contextlib
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.parameter_server.serving import DEADLINE, serving
from tests.strategies.ranked import Ranked
from tests.sweeps import some, sweep
from tfdist.cluster.settings import Timeouts
from tfdist.errors import PeerLostError
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.tables.client import TableSpec
from tfdist.parameter_server.tables.row_cache import CachePolicy
from tfdist.strategies.embeddings.dynamic_embedding import DynamicEmbedding
from tfdist.strategies.servers.server_tables import ServerConnections, ServerTables

DIM, SAMPLES = 3, 23
INITIAL = InitialRows("normal", 0.5, seed=5)
GENERATOR = np.random.default_rng(1)
NAMES = GENERATOR.integers(-(2**63), 2**63 - 1, 12)
X = NAMES[GENERATOR.integers(0, 12, (SAMPLES, 4))]
Y = np.sin(np.arange(SAMPLES, dtype=np.float32))[:, np.newaxis]


class Control:
    """A stand-in for the `tfdist.cluster.control.Control` of one task."""

    def __init__(self, task, servers):
        self.task, self.failure, self.watchers = task, None, []
        self._addresses = {
            f"address of parameter server {place}": server.address for place, server in enumerate(servers)
        }

    def look_up(self, key):
        return self._addresses[key]

    known = look_up

    def watch(self, watcher):
        self.watchers.append(watcher)

    def fail(self, error):
        self.failure = self.failure or error


def servers_of(running, worker, workers=2):
    tasks = [SimpleNamespace(job="worker", index=index) for index in range(workers)]
    tasks += [SimpleNamespace(job="ps", index=index) for index in range(len(running))]
    member = SimpleNamespace(cluster=SimpleNamespace(tasks=tasks), control=Control(worker, running))
    return ServerConnections(member, Timeouts(heartbeat=DEADLINE))


@contextlib.contextmanager
def started(ranks, servers=1):
    """Calls ``work(strategy)`` on two ranks, whose embeddings are on servers."""
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serving()) for _ in range(servers)]
        tables = [ServerTables(servers_of(running, worker), workers=2) for worker in range(2)]
        for rank_tables in tables:
            stack.callback(rank_tables.close)
        both = ranks(2)

        def on_both(work, *arguments):
            return both(lambda group: work(Ranked(group, tables=tables[group.rank]), *arguments))

        on_both.running = running
        yield on_both


def made(strategy=None, optimizer="sgd", kind=keras.Sequential, policy=None, **compiled):
    """A model under a strategy; or a reference, which is eager, as it would trace longer than it trains."""
    compiled = {"run_eagerly": strategy is None, **compiled}
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        layers = [
            keras.layers.Input((4,), dtype="int64"),
            DynamicEmbedding(DIM, INITIAL, policy, name="rows"),
            keras.layers.Flatten(),
            keras.layers.Dense(1, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1)),
        ]
        model = kind(layers)
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **compiled)
        return model


def batches(rows=5):
    """A dataset of batches: of arrays, Keras would trace functions that make them, anew in each call."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows)


def trained(model, batch_size=5, epochs=2):
    """Batches of 5, 5, 5, 5 and 3 samples: shares of two ranks are unequal. With 11, the last batch has one."""
    history = model.fit(batches(batch_size), epochs=epochs, shuffle=False, verbose=0).history
    return history, model.layers[0].export(), model.get_weights()


def assert_alike(results, expected):
    for name, values in expected[0].items():
        np.testing.assert_allclose(results[0][name], values, rtol=1e-5)
    np.testing.assert_array_equal(results[1][0], expected[1][0])
    np.testing.assert_allclose(results[1][1], expected[1][1], rtol=1e-4, atol=1e-5)
    for weight, other in zip(results[2], expected[2], strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.2),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.03, 9)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2)),
}


@pytest.mark.parametrize("name", some(OPTIMIZERS, 3, first=2))
def test_two_ranks_train_evaluate_and_predict_as_one_process_does(ranks, name):
    """One of them evaluates and predicts nothing of the last batch."""

    def work(strategy=None):
        model = made(strategy, OPTIMIZERS[name], metrics=["mae"])
        training = trained(model)
        return training, model.evaluate(batches(11), verbose=0), model.predict(batches(11), verbose=0)

    expected, evaluated, predicted = work()
    with started(ranks, servers=2) as on_both:
        both = on_both(work)
        for results in both:
            assert_alike(results[0], expected)
            np.testing.assert_allclose(results[1], evaluated, rtol=1e-5)
            np.testing.assert_allclose(results[2], predicted, rtol=1e-4, atol=1e-5)
        for weight, other in zip(both[0][0][2], both[1][0][2], strict=True):
            np.testing.assert_array_equal(weight, other, "dense weights are equal")
        for server in on_both.running:
            (served,) = server._shards.tables
            assert served.table.iterations == 10, "one update in each step"


@pytest.mark.parametrize("compiled", [sweep({"run_eagerly": True}), {"steps_per_execution": 3}], ids=str)
def test_eager_and_multi_step_ranks_train_as_one_process(ranks, compiled):
    expected = trained(made())
    with started(ranks) as on_both:
        for results in on_both(lambda strategy: trained(made(strategy, **compiled))):
            assert_alike(results, expected)


def test_a_rank_without_samples_touches_no_rows(ranks):
    """The last batch is of one sample; with Adam also a gradient of zeros would move a row."""
    expected = trained(made(optimizer="adam"), batch_size=11)
    with started(ranks) as on_both:
        for results in on_both(lambda strategy: trained(made(strategy, "adam", run_eagerly=True), batch_size=11)):
            assert_alike(results, expected)


def test_a_row_that_stands_in_uses_no_keys(ranks):
    """A rank without samples computes on a row of the batch. Two steps use each key twice, the third one admits it."""

    def work(strategy):
        model = made(strategy, policy=RowPolicy(admit_after=3), run_eagerly=True)
        found = []
        for steps in (2, 1):
            model.fit(batches(1).take(1).repeat(steps), shuffle=False, verbose=0)
            found.append(model.layers[0].export()[0].tolist())
        return found

    with started(ranks) as on_both:
        for before, after in on_both(work):
            assert before == []
            assert after == sorted(set(X[0].tolist()))


def test_steps_are_traced_once(ranks):
    """A step that makes variables would be traced again."""
    traces = []

    class Traced(keras.Sequential):
        def train_step(self, data):
            traces.append(data)
            return super().train_step(data)

    with started(ranks) as on_both:
        on_both(lambda strategy: made(strategy, kind=Traced).fit(batches(), shuffle=False, verbose=0))
    assert len(traces) == 2, "on each of two ranks"


def test_saved_rows_are_loaded_before_any_rank_goes_on(ranks, tmp_path):
    def work(strategy):
        model = made(strategy, lambda: keras.optimizers.SGD(0.05, momentum=0.9), run_eagerly=True)
        model.fit(batches(), shuffle=False, verbose=0)
        model.save(tmp_path / "model.keras")
        before = model.predict(batches(SAMPLES), verbose=0)
        with strategy.scope():
            again = keras.models.load_model(tmp_path / "model.keras")
        keys = again.layers[0].export()[0]
        return before, again.predict(batches(SAMPLES), verbose=0), keys, model.layers[0].export()[0]

    with started(ranks) as on_both:
        for before, after, keys, expected in on_both(work):
            np.testing.assert_allclose(after, before, rtol=1e-6)
            np.testing.assert_array_equal(keys, expected)
            assert len(keys) > 5


def test_custom_loop_sums_gradients_of_ranks(ranks):
    """As `tf.distribute` has it: gradients of replicas are added."""

    def step(strategy):
        with strategy.scope():
            layer = DynamicEmbedding(DIM, INITIAL)
            layer.build(None)
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build(layer.trainable_variables)

        def replica(key):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(key, training=True))
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply(gradients, layer.trainable_variables)

        strategy.run(replica, (tf.constant([7, 8 + strategy.rank], tf.int64),))
        return layer.export()

    with started(ranks) as on_both:
        for keys, rows in on_both(step):
            assert keys.tolist() == [7, 8, 9]
            expected = INITIAL.rows(keys, DIM, np.dtype(np.float32)) - 0.5 * np.array([[2], [1], [1]])
            np.testing.assert_allclose(rows, expected, rtol=1e-6)


def test_dynamic_embedding_without_servers_raises(ranks):
    def work(group):
        with pytest.raises(ValueError, match="Give the job parameter servers"):
            made(Ranked(group))

    ranks(2)(work)


def test_row_cache_under_all_reduce_raises(ranks):
    def work(strategy):
        with strategy.scope(), pytest.raises(ValueError, match="AllReduceStrategy trains as one process does"):
            DynamicEmbedding(DIM, cache=CachePolicy(10, 1)).build(None)

    with started(ranks) as on_both:
        on_both(work)


FORM = TableSpec(DIM, INITIAL, RowPolicy())
KEYS = np.array([1, 2], np.int64)


@pytest.mark.parametrize("is_used", [True, False])
def test_a_server_that_is_lost_ends_jobs_that_use_it(is_used):
    """A worker's loss is not for tables to judge."""
    with serving() as server:
        tables = ServerTables(servers_of([server], 0, workers=1), workers=1)
        control = tables._servers.member.control
        (watcher,) = control.watchers
        if is_used:
            table = tables.table("rows", FORM)
        watcher.lost(0, PeerLostError("worker 0 died."))
        assert control.failure is None
        watcher.lost(1, PeerLostError("ps 0 died."))
        if is_used:
            assert "ps 0 died. Rows of embeddings were on it" in str(control.failure)
            with pytest.raises(PeerLostError, match=r"ps 0 died\."):
                table.lookup(KEYS, create=False)
            assert tables.failure is control.failure
        else:
            assert control.failure is None
        tables.close()


def test_asynchronous_tables_do_not_watch_servers():
    with serving() as server:
        assert not ServerTables(servers_of([server], 0))._servers.member.control.watchers


def test_tables_have_names_of_their_own():
    """Layers of one name, and strategies of one process."""
    with serving() as server, contextlib.ExitStack() as stack:
        made = [ServerTables(servers_of([server], 0, workers=1), 1, prefix) for prefix in ("", "strategy 1 ")]
        for tables in made:
            stack.callback(tables.close)
            for _ in range(2):
                tables.table("rows_5", FORM).lookup(KEYS, create=False)
        names = [served.described.table for served in server._shards.tables]
        assert names == ["rows-0", "rows-1", "strategy 1 rows-0", "strategy 1 rows-1"]
