"""Workers that change the servers' memory themselves; the servers are threads of this process."""

import contextlib

import keras
import numpy as np
import pytest

from tests.parameter_server.serving import serving
from tests.strategies.embeddings.test_served_embeddings import KEYS, TARGETS, embedded
from tests.strategies.served import Served, served
from tests.strategies.servers.test_local_link import RATE, fit_together, linear_in
from tests.strategies.servers.trained import OPTIONS, X, Y, assert_close, fit, links, model_in
from tests.sweeps import sweep
from tfdist.parameter_server import Asynchronous, BoundedStaleness, Hogwild, Inverse, Servers
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.protocol import hogwild_memory as memory
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

ROWS = 500


@pytest.mark.parametrize("name", ["steps", *map(sweep, ("adam", "loss scale", "eager", "constraint"))])
def test_one_worker_trains_as_keras_does(name):
    options = OPTIONS.get(name, {})
    alone = model_in(**options)
    with served(servers=2, pushes=Hogwild()) as (strategy,):
        model = model_in(strategy, **options)
        for each_model in (alone, model):
            if name == "constraint":
                each_model.layers[0].kernel.constraint = keras.constraints.MaxNorm(0.5)
        expected, history = (fit(each_model, validation_data=(X, Y)).history for each_model in (alone, model))
        assert_close(model, alone)
        for key, values in expected.items():
            np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)
        (link,) = links(model)
        report = link.report()
        assert link._writers is not None
        assert (report.version, report.workers[0].counted, dict(report.staleness)) == (12, 12, {0: 12})
        assert report.received < 2 * report.nbytes, "the first values, and no gradients"


@pytest.mark.parametrize("name", ["Adagrad", *map(sweep, ("SGD", "Adadelta", "RMSprop", "Adam"))])
def test_embeddings_train_as_keras_does(name):
    """Adam moves all rows; of the others, rows are exchanged. Duplicates within a batch, too."""
    keys, optimizer = KEYS % ROWS, {"class_name": name, "config": {"learning_rate": 0.01}}
    alone = embedded(None, lambda: keras.optimizers.get(optimizer), ROWS)
    with served(pushes=Hogwild()) as (strategy,):
        model = embedded(strategy, lambda: keras.optimizers.get(optimizer), ROWS)
        for each_model in (alone, model):
            fit(each_model, keys, y=TARGETS, batch_size=32, epochs=2)
        assert_close(model, alone, rtol=1e-3)
        (link,) = links(model)
        assert (0 in link._bases) == (name == "Adam"), "whether all rows are exchanged"


def test_workers_add_to_one_memory():
    with served(3, servers=2, pushes=Hogwild()) as strategies:
        models = [linear_in(strategy) for strategy in strategies]
        fit_together(models, (5, 5, 2), (3, 5, 4))
        for model in models:
            for weight in model.get_weights():
                np.testing.assert_allclose(weight, np.full_like(weight, -12 * RATE))
        report = links(models[0])[0].report()
        assert [worker.counted for worker in report.workers] == [5, 5, 2]
        assert report.version == sum(report.staleness.values()) == 12


def embedded_in(strategy):
    return embedded(strategy, lambda: keras.optimizers.SGD(0.1), ROWS, run_eagerly=True)


@pytest.mark.parametrize("lag", [1, memory.RING])
def test_rows_of_others_are_read(lag, monkeypatch):
    """Two workers in turn. With a short ring the second one reads the whole table, as it does not know the rows."""
    monkeypatch.setattr(memory, "RING", max(8, memory.RING // lag))
    with served(2, pushes=Hogwild()) as strategies:
        first, second = (embedded_in(strategy) for strategy in strategies)
        for model in (first, second):
            model.train_on_batch(KEYS[:2] % ROWS, TARGETS[:2])
        for batch in range(4):
            chosen = slice(8 * batch, 8 * batch + 8)
            first.train_on_batch(KEYS[chosen] % ROWS, TARGETS[chosen])
        before = second.layers[0].embeddings.numpy()
        second.train_on_batch(KEYS[:1] % ROWS, TARGETS[:1])
        after, pushed_rows = second.layers[0].embeddings.numpy(), np.unique(KEYS[:1] % ROWS)
        rest = np.setdiff1d(np.unique(KEYS[:32] % ROWS), pushed_rows)
        np.testing.assert_array_equal(after[rest], first.layers[0].embeddings.numpy()[rest])
        assert (before[rest] != after[rest]).any(axis=1).all()


def test_chief_assignments_keep_rows_changed_by_workers():
    """Rows of the table that another worker has changed meanwhile keep that worker's values."""
    with served(2, pushes=Hogwild()) as strategies:
        chief, other = (embedded_in(strategy) for strategy in strategies)
        for model in (chief, other):
            model.train_on_batch(KEYS[:2] % ROWS, TARGETS[:2])
        chief.evaluate(KEYS[:2] % ROWS, TARGETS[:2], verbose=0)
        given = [weight + 1 for weight in chief.get_weights()]
        chief.set_weights(given)
        other.train_on_batch(KEYS[4:5] % ROWS, TARGETS[4:5])
        for model in (chief, other):
            model.evaluate(KEYS[:2] % ROWS, TARGETS[:2], verbose=0)
        untouched = np.setdiff1d(np.arange(ROWS), KEYS[4:5] % ROWS)
        for model in (chief, other):
            np.testing.assert_array_equal(model.get_weights()[0][untouched], given[0][untouched])
            np.testing.assert_array_equal(model.get_weights()[1], given[1])


def test_worker_without_shared_memory_sends_messages(monkeypatch, caplog):
    alone = model_in()
    monkeypatch.setattr(memory.Memory, "open", classmethod(lambda *arguments: None))
    with served(pushes=Hogwild()) as (strategy,):
        model = model_in(strategy)
        for each_model in (alone, model):
            fit(each_model)
        assert_close(model, alone)
        (link,) = links(model)
        assert link._writers is None
        assert (link.session.pushes, link.report().version) == (12, 12)
    assert "cannot open the parameter servers' memory" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"synchronization": BoundedStaleness(3)}, "servers do not see updates"),
        ({"synchronization": Asynchronous(Inverse())}, "servers do not see updates"),
        ({"servers": Servers(copies=1)}, "that could be copied"),
    ],
)
def test_incompatible_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        ParameterServerStrategy(pushes=Hogwild(), **options)


def test_restarted_server_restores_values_from_shared_memory():
    alone = model_in()
    with contextlib.ExitStack() as stack:
        first = contextlib.ExitStack()
        server = first.enter_context(serving(is_hogwild=True))
        strategy = Served([server], 0, Arguments(pushes=Hogwild()))
        stack.callback(strategy.extended._close)
        model = model_in(strategy, run_eagerly=True)
        for each_model in (alone, model):
            fit(each_model, epochs=1)
        first.close()
        link = links(model)[0]
        link._writers[0].add(1, np.array([0, 0.5], np.float32))  # as another worker, of which the chief knows nothing
        again = stack.enter_context(serving(address=server.address, is_hogwild=True))
        model.evaluate(X, Y, verbose=0)
        alone.layers[0].bias.assign_add([0, 0.5])
        assert_close(model, alone)
        for each_model in (alone, model):
            fit(each_model, epochs=1)
        assert_close(model, alone)
        assert [shard.report("", 0).version for shard in again._shards] == [4]
