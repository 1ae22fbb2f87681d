"""`DynamicEmbedding` in plain Keras and on parameter servers, which are threads of this process."""

import contextlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.multiprocess import harness
from tests.strategies.ranked import on_ranks
from tests.strategies.served import served
from tests.sweeps import some, sweep
from tfdist.errors import TfdistError
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.tables.row_cache import CachePolicy
from tfdist.strategies.embeddings.dynamic_embedding import DynamicEmbedding

DIM, ROWS = 4, 30
INITIAL = InitialRows("normal", 0.5, seed=11)
GENERATOR = np.random.default_rng(0)
NAMES = np.sort(GENERATOR.integers(-(2**63), 2**63 - 1, ROWS))
"""The keys of rows 0, 1, …"""
X = GENERATOR.integers(0, ROWS - 2, (48, 5))
Y = np.sin(X[:, :1]).astype("float32")


def sequential(embedding, optimizer="sgd", strategy=None, **options):
    keras.utils.set_random_seed(0)

    def make():
        layers = [
            keras.layers.Input((5,), dtype="int64"),
            embedding(),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1)),
        ]
        model = keras.Sequential(layers)
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **options)
        return model

    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def dynamic(optimizer="sgd", strategy=None, compiled=None, **options):
    return sequential(
        lambda: DynamicEmbedding(DIM, initial=INITIAL, **options), optimizer, strategy, **(compiled or {})
    )


class OneHot(keras.layers.Embedding):
    """Has dense gradients. Of sparse ones, Keras squares and clips each occurrence of a key by itself."""

    def call(self, inputs):
        return keras.ops.matmul(keras.ops.one_hot(inputs, ROWS), self.embeddings)


def fixed(optimizer="sgd", kind=OneHot):
    """A reference of Keras, which is eager, as it would trace longer than it trains."""
    model = sequential(lambda: kind(ROWS, DIM), optimizer, run_eagerly=True)
    model.layers[0].set_weights([INITIAL.rows(NAMES, DIM, np.dtype(np.float32))])
    return model


def batches(x):
    """A dataset of batches: of arrays, Keras would trace functions that make them, anew in each call."""
    return tf.data.Dataset.from_tensor_slices((x, Y)).batch(16)


def fit(model, x=None, epochs=3, **options):
    data = batches(NAMES[X] if x is None else x)
    return model.fit(data, epochs=epochs, shuffle=False, verbose=0, **options)


def assert_equal(model, expected, rtol=1e-4):
    """A model with `DynamicEmbedding`, and one with `Embedding`."""
    used = np.unique(X)
    keys, rows = model.layers[0].export()
    np.testing.assert_array_equal(keys, NAMES[used])
    np.testing.assert_allclose(rows, expected.layers[0].get_weights()[0][used], rtol=rtol, atol=1e-6)
    for weight, other in zip(model.layers[-1].get_weights(), expected.layers[-1].get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=rtol, atol=1e-6)


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.3),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.3, 9)),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.3)),
    "clipvalue": lambda: keras.optimizers.SGD(0.3, clipvalue=0.001),
}


@pytest.mark.parametrize("name", some(OPTIMIZERS, 4))
def test_training_equals_one_hot_embedding(name):
    expected = fixed(OPTIMIZERS[name])
    expected_history = fit(expected, X)
    model = dynamic(OPTIMIZERS[name])
    history = fit(model, validation_data=batches(NAMES[X]))
    assert_equal(model, expected)
    np.testing.assert_allclose(history.history["loss"], expected_history.history["loss"], rtol=1e-4)
    np.testing.assert_allclose(history.history["val_loss"][-1], expected.evaluate(batches(X), verbose=0), rtol=1e-4)
    assert int(model.optimizer.iterations) == 9


ON_ONE_THREAD = """
import keras, numpy as np, tensorflow as tf, tfdist
tf.config.threading.set_inter_op_parallelism_threads(1)
layers = [keras.layers.Input((), dtype="int64"), tfdist.layers.DynamicEmbedding(2)]
model = keras.Sequential(layers)
model.compile("adam", "mse")
model.fit(np.arange(8), np.ones((8, 2)), epochs=2, verbose=0)
print("ROWS", len(layers[1].export()[0]))
"""


@pytest.mark.multiprocess
def test_dynamic_embedding_trains_on_one_thread(tmp_path):
    """The table's graph must not wait for the thread that waits for it."""
    program = tmp_path / "on_one_thread.py"
    program.write_text(ON_ONE_THREAD)
    (ended,) = harness.run([str(program)], 1)
    assert "ROWS 8" in ended.output


def test_training_equals_keras_embedding():
    expected = fixed(kind=keras.layers.Embedding)
    fit(expected, X)
    model = dynamic()
    fit(model)
    assert_equal(model, expected)


@pytest.mark.parametrize("compiled", some([{"run_eagerly": True}, {"steps_per_execution": 3}]))
def test_eager_and_multi_step_training_equal_keras(compiled):
    expected = fixed()
    fit(expected, X)
    model = dynamic(compiled=compiled)
    fit(model)
    assert_equal(model, expected)
    with served(servers=2) as (strategy,):
        model = dynamic(strategy=strategy, compiled=compiled)
        fit(model)
        assert_equal(model, expected)


@pytest.mark.parametrize("steps", [sweep(1), 2])
def test_data_of_unknown_length_make_no_update_more(steps):
    expected = fixed()
    fit(expected, X)
    with served() as (strategy,):
        model = dynamic(strategy=strategy, compiled={"steps_per_execution": steps})
        data = tf.data.Dataset.from_tensor_slices((NAMES[X], Y)).batch(16).filter(lambda x, y: True)
        model.fit(data, epochs=3, verbose=0)
        assert_equal(model, expected)
        for server in strategy.servers:
            assert [served.table.iterations for served in server._shards.tables] == [9]


@pytest.mark.parametrize("name", some(OPTIMIZERS, 4, first=1))
def test_one_worker_on_servers_trains_as_keras_does(name):
    expected = fixed(OPTIMIZERS[name])
    fit(expected, X)
    with served() as (strategy,):
        model = dynamic(OPTIMIZERS[name], strategy)
        history = fit(model)
        assert_equal(model, expected)
        losses = [each.evaluate(batches(x), verbose=0) for each, x in ((model, NAMES[X]), (expected, X))]
        np.testing.assert_allclose(*losses, 1e-4)
        assert len(history.history["loss"]) == 3
        assert int(model.optimizer.iterations) == 9


def test_servers_and_one_process_give_the_same_with_adam():
    alone = dynamic("adam", compiled={"run_eagerly": True})
    fit(alone)
    with served(servers=2) as (strategy,):
        model = dynamic("adam", strategy)
        fit(model)
        for array, other in zip(model.layers[0].export(), alone.layers[0].export(), strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-6)


def test_a_worker_that_keeps_rows_trains_as_one_that_does_not(tmp_path):
    """And it evaluates the newest rows; the policy is saved with the layer."""
    with served() as (strategy,):
        model = dynamic("adam", strategy)
        fit(model)
        expected = model.layers[0].export()
    with served(servers=2, workers=2) as (strategy, other):
        model, second = (
            dynamic("adam", each_strategy, cache=CachePolicy(20, 3)) for each_strategy in (strategy, other)
        )
        fit(model)
        for exported, array in zip(model.layers[0].export(), expected, strict=True):
            np.testing.assert_array_equal(exported, array)
        cache = model.layers[0]._rows.table.cache
        assert cache.found > 0.3 * cache.asked
        fit(second, epochs=1)
        asked = cache.asked
        np.testing.assert_array_equal(model.predict(NAMES[X], verbose=0), second.predict(NAMES[X], verbose=0))
        assert cache.asked == asked
        model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras").layers[0]
    assert again.get_config()["cache"] == {"rows": 20, "staleness": 3, "reads_own_writes": True}
    assert DynamicEmbedding.from_config(again.get_config())._settings.cache == CachePolicy(20, 3)


def test_updates_of_all_workers_count():
    """At the same time, with a loss that is linear in the rows, so that their order does not matter."""

    def linear(strategy):
        with strategy.scope():
            rows = DynamicEmbedding(DIM, INITIAL)
            model = keras.Sequential([keras.layers.Input((5,), dtype="int64"), rows, keras.layers.Flatten()])
            model.compile(keras.optimizers.SGD(0.5), lambda y, outputs: tf.reduce_sum(outputs, axis=-1))
            return model

    with served(workers=2) as strategies:
        models = [linear(strategy) for strategy in strategies]
        threads = [threading.Thread(target=fit, args=(model,), daemon=True) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        keys, rows = models[0].layers[0].export()
        np.testing.assert_array_equal(models[1].layers[0].export()[1], rows)
        used, counts = np.unique(X, return_counts=True)
        np.testing.assert_array_equal(keys, NAMES[used])
        expected = INITIAL.rows(keys, DIM, np.dtype(np.float32)) - 0.5 * 2 * 3 * counts[:, np.newaxis] / 16
        np.testing.assert_allclose(rows, expected, rtol=1e-5)


def test_a_worker_looks_up_what_another_one_has_trained():
    with served(workers=2) as (first, second):
        chief, worker = (dynamic(strategy=strategy, compiled={"run_eagerly": True}) for strategy in (first, second))
        fit(chief, epochs=1)
        fit(worker, epochs=1)
        np.testing.assert_array_equal(
            chief.predict(NAMES[X], verbose=0), worker.predict(NAMES[X], verbose=0), "the same values of one version"
        )
        np.testing.assert_array_equal(chief.layers[0].export()[1], worker.layers[0].export()[1])
        assert int(worker.optimizer.iterations) == 6


@pytest.mark.parametrize("is_served", [sweep(False), True])
def test_predictions_make_no_rows(is_served):
    with served() as (strategy,):
        model = dynamic(strategy=strategy if is_served else None, compiled={"run_eagerly": True})
        first = model.predict(NAMES[X], verbose=0)
        model.evaluate(NAMES[X], Y, verbose=0)
        assert len(model.layers[0].export()[0]) == 0
        fit(model, epochs=1)
        trained = model.layers[0].export()
        new = np.full((3, 5), 12345)
        model.predict(new, verbose=0)
        for array, other in zip(model.layers[0].export(), trained, strict=True):
            np.testing.assert_array_equal(array, other)
        assert not np.array_equal(model.predict(NAMES[X], verbose=0), first)


def test_a_frozen_layer_makes_and_changes_no_rows():
    model = dynamic()
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    fit(model, epochs=1)
    assert len(model.layers[0].export()[0]) == 0


def test_the_policy_admits_and_evicts():
    with served(servers=2) as (strategy,):
        compiled = {"run_eagerly": True}
        model = dynamic(strategy=strategy, compiled=compiled, policy=RowPolicy(admit_after=3))
        fit(model, epochs=1)
        batches = [np.unique(NAMES[X[begin : begin + 16]]) for begin in (0, 16, 32)]
        keys, uses = np.unique(np.concatenate(batches), return_counts=True)
        np.testing.assert_array_equal(model.layers[0].export()[0], keys[uses >= 3])
        assert not (uses >= 3).all()
        bounded = dynamic(strategy=strategy, compiled=compiled, policy=RowPolicy(max_rows=5))
        fit(bounded, epochs=1)
        assert len(bounded.layers[0].export()[0]) == 10, "5 on each server"


def test_saved_rows_are_loaded(tmp_path):
    alone = dynamic("adagrad", compiled={"run_eagerly": True})
    fit(alone)
    alone.save(tmp_path / "alone.keras")
    again = keras.models.load_model(tmp_path / "alone.keras")
    np.testing.assert_allclose(again.predict(NAMES[X], verbose=0), alone.predict(NAMES[X], verbose=0), rtol=1e-6)
    assert again.layers[0].get_config() == alone.layers[0].get_config()
    slot, accumulated = again.optimizer.variables[-1], alone.optimizer.variables[-1]
    np.testing.assert_array_equal(slot, accumulated, "of the other variables")
    with served() as (strategy,):
        with strategy.scope():
            model = keras.models.load_model(tmp_path / "alone.keras")
        np.testing.assert_allclose(model.predict(NAMES[X], verbose=0), alone.predict(NAMES[X], verbose=0), rtol=1e-6)
        fit(model, epochs=1)
        model.save(tmp_path / "served.keras")
        last = keras.models.load_model(tmp_path / "served.keras")
        for array, other in zip(last.layers[0].export(), model.layers[0].export(), strict=True):
            np.testing.assert_array_equal(array, other)
        assert not np.array_equal(last.layers[0].export()[1], alone.layers[0].export()[1])


def test_another_optimizer_goes_on_with_the_rows():
    expected, alone = fixed(), dynamic(compiled={"run_eagerly": True})
    with served() as (strategy,):
        on_servers = dynamic(strategy=strategy)
        for model in (expected, alone, on_servers):
            x = X if model is expected else NAMES[X]
            fit(model, x, epochs=1)
            with model.distribute_strategy.scope():
                model.compile(keras.optimizers.Adagrad(0.1), "mse", run_eagerly=model is not on_servers)
            fit(model, x, epochs=1)
        assert_equal(alone, expected)
        assert_equal(on_servers, expected)


def test_two_layers_have_their_own_rows_and_a_shared_one_sums_gradients():
    def towers(embedding, **options):
        keras.utils.set_random_seed(1)
        users, items, other = (keras.layers.Input((), dtype="int64") for _ in range(3))
        of_items = embedding(1)
        left = embedding(0)(users)
        score = keras.layers.Dot(1)([left, of_items(items)]) - keras.layers.Dot(1)([left, of_items(other)])
        model = keras.Model([users, items, other], score)
        model.compile(keras.optimizers.SGD(0.5), "mse", **options)
        return model

    def embedding(seed):
        return DynamicEmbedding(DIM, InitialRows(scale=0.5, seed=seed))

    def embedding_of_keras(seed):
        values = InitialRows(scale=0.5, seed=seed).rows(NAMES, DIM, np.dtype(np.float32))
        layer = keras.layers.Embedding(ROWS, DIM)
        layer.build(None)
        layer.set_weights([values])
        return layer

    def rows_of(model, kind):
        return [layer for layer in model.layers if isinstance(layer, kind)]

    expected = towers(embedding_of_keras, run_eagerly=True)
    inputs = tuple(X[:, place] for place in range(3))
    fit(expected, inputs)
    with served() as (strategy,):
        with strategy.scope():
            model = towers(embedding)
        fit(model, tuple(NAMES[indices] for indices in inputs))
        assert int(model.optimizer.iterations) == 9, "though no other variable is trained"
        whole = rows_of(expected, keras.layers.Embedding)
        for layer, other in zip(rows_of(model, DynamicEmbedding), whole, strict=True):
            keys, rows = layer.export()
            places = np.searchsorted(NAMES, keys)
            np.testing.assert_allclose(rows, other.get_weights()[0][places], rtol=1e-4, atol=1e-6)
            assert len(keys) > 10


def test_mixed_precision_trains_float32_rows():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = dynamic("sgd")
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert model.layers[0].compute_dtype == "float16"
        losses = fit(model, epochs=8).history["loss"]
    finally:
        keras.config.set_dtype_policy("float32")
    assert losses[-1] < losses[0]
    keys, rows = model.layers[0].export()
    assert rows.dtype == np.float32
    assert np.abs(rows - INITIAL.rows(keys, DIM, rows.dtype)).max() > 0


def test_invalid_use_raises():
    with pytest.raises(ValueError, match="dim must be"):
        DynamicEmbedding(0)
    with pytest.raises(ValueError, match="is not built"):
        DynamicEmbedding(2).export()
    with pytest.raises(TypeError, match="takes integers as keys; got float32"):
        DynamicEmbedding(2)(np.ones((2, 2), "float32"))
    with served() as (strategy,):
        model = dynamic(lambda: keras.optimizers.Adam(clipnorm=1.0), strategy)
        with pytest.raises(TfdistError, match="use clipvalue="):
            fit(model, epochs=1)


@pytest.mark.parametrize("is_served", [False, True])
def test_a_model_without_an_input_takes_keys_as_they_are(is_served, tmp_path):
    """Floats would make one key of several."""
    with contextlib.ExitStack() as stack:
        if is_served:
            stack.enter_context(stack.enter_context(served())[0].scope())
        model = keras.Sequential([DynamicEmbedding(DIM, initial=INITIAL), keras.layers.Flatten()])
        model.compile("sgd", "mse")
        keys = NAMES[:24].reshape(8, 3)
        model.fit(keys, np.zeros((8, 3 * DIM)), verbose=0)
        np.testing.assert_array_equal(model.layers[0].export()[0], NAMES[:24])
        model.save(tmp_path / "model.keras")
        expected = model.predict(keys, verbose=0)
    again = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict(keys, verbose=0), expected, rtol=1e-6)


def test_several_replicas_are_refused(ranks):
    def build(strategy):
        with strategy.scope():
            DynamicEmbedding(2).build((None,))

    with pytest.raises(ValueError, match="can be trained by one replica only"):
        on_ranks(ranks(2), build)


class Scores(keras.Model):
    """As tutorials write it: `call` has no argument ``training``."""

    def __init__(self):
        super().__init__()
        self.rows = DynamicEmbedding(DIM, initial=INITIAL)
        self.score = keras.layers.Dense(1)

    def call(self, keys):
        return self.score(keras.ops.mean(self.rows(keys), 1))


@pytest.mark.parametrize(("servers", "loop"), some([(0, "fit"), (0, "own"), (2, "fit"), (2, "own")], 3))
def test_training_without_training_argument_creates_rows(servers, loop):
    def train(strategy=None):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = Scores()
            model.compile("sgd", "mse")
        model.predict(NAMES[X], verbose=0)
        assert len(model.rows.export()[0]) == 0
        if loop == "fit":
            losses = fit(model, epochs=5).history["loss"]
            assert losses[-1] < losses[0]
        else:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(NAMES[X]) - Y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        keys, rows = model.rows.export()
        np.testing.assert_array_equal(keys, np.unique(NAMES[X]))
        assert not np.allclose(rows, INITIAL.rows(keys, DIM, np.dtype(np.float32))), "they are trained"

    if not servers:
        train()
    else:
        with served(servers=servers) as (strategy,):
            train(strategy)
