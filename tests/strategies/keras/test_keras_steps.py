"""Steps of Keras over ranks with unequal shares, compared with plain Keras on the whole batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, RankedShards, on_ranks
from tfdist.strategies.keras import keras_steps
from tfdist.strategies.keras.keras_steps import Step

rng = np.random.default_rng(0)
X = rng.normal(size=(11, 4)).astype(np.float32)
Y = (X @ rng.normal(size=(4, 1))).astype(np.float32)
START = [rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (3,), (3, 1), (1,))]


def built(kind=keras.Sequential, **arguments):
    model = kind([keras.layers.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0), "mse", metrics=["mae"], **arguments)
    model.set_weights(START)
    return model


def reference():
    """Plain Keras, eagerly, as it would trace longer than it trains."""
    return built(run_eagerly=True)


def in_scope(strategy, *arguments, **more):
    with strategy.scope():
        return built(*arguments, **more)


def batches(rows=5):
    """A dataset of batches: of arrays, Keras would trace functions that make them, anew in each call."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(rows)


def trained(model):
    history = model.fit(batches(), shuffle=False, verbose=0).history
    return history, model.evaluate(batches(), verbose=0), model.get_weights()


@pytest.fixture(scope="module")
def expected():
    return trained(reference())


@pytest.mark.parametrize(
    "arguments", [{}, {"run_eagerly": True}, {"steps_per_execution": 2, "jit_compile": True}], ids=str
)
def test_training_ends_where_one_process_ends(ranks, arguments, expected):
    """Whose batches are of 5, 5 and 1 samples: in the last, rank 1 has none."""
    for results in on_ranks(ranks(2), lambda strategy: trained(in_scope(strategy, **arguments))):
        for name, values in expected[0].items():
            np.testing.assert_allclose(results[0][name], values, rtol=1e-4)
        np.testing.assert_allclose(results[1], expected[1], rtol=1e-4)
        for weight, other in zip(results[2], expected[2], strict=True):
            np.testing.assert_allclose(weight, other, rtol=1e-3, atol=1e-5)


def test_devices_count_alike_where_the_number_of_batches_is_unknown(ranks, monkeypatch):
    """The step that finds no data counts as one of the optimizer, as in plain Keras, but on some devices only."""
    level_counts, levelled = keras_steps.level_counts, []

    def after_one_has_not_counted(model):
        levelled.append(model)
        for variable in (model.optimizer.iterations, model.layers[0].seed_generator.state):
            variable.value.values[1].assign_sub(tf.ones_like(variable.value.values[1]))
        level_counts(model)

    monkeypatch.setattr(keras_steps, "level_counts", after_one_has_not_counted)

    def counts(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dropout(0.5, seed=7), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        model.fit(batches().filter(lambda x, y: True), verbose=0)
        variables = model.optimizer.iterations, model.layers[0].seed_generator.state
        return [[copy.numpy().tolist() for copy in variable.value.values] for variable in variables]

    assert on_ranks(ranks(2), counts, devices=["CPU:0", "CPU:1"]) == [[[4, 4], [[7, 4], [7, 4]]]] * 2
    assert len(levelled) == 2


def test_training_ends_where_optimizers_are_in_parts(ranks, monkeypatch, expected):
    """And the number of batches is unknown: a rank has no values of variables that others keep."""
    monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)

    def work(group):
        model = in_scope(RankedShards(group))
        model.fit(batches().filter(lambda x, y: True), verbose=0)
        return model.get_weights()

    for weights in ranks(2)(work):
        for weight, other in zip(weights, expected[2], strict=True):
            np.testing.assert_allclose(weight, other, rtol=1e-3, atol=1e-5)


def test_predict_returns_all_rows_in_their_order(ranks):
    """And none for the rows that stand in for samples."""

    def predicted(model):
        return [model.predict(tf.data.Dataset.from_tensor_slices(X[:rows]).batch(3), verbose=0) for rows in (1, 7, 11)]

    expected = predicted(reference())
    for results in on_ranks(ranks(2), lambda strategy: predicted(in_scope(strategy))):
        for predictions, of_one in zip(results, expected, strict=True):
            np.testing.assert_allclose(predictions, of_one, rtol=1e-4, atol=1e-6, err_msg=f"of {len(of_one)} rows")


def test_own_batches_of_processes_form_one_batch(ranks):
    """By `train_on_batch` and `test_on_batch`, of different numbers of rows."""

    def steps(model, x, y):
        trained = [model.train_on_batch(x, y, return_dict=True) for _ in range(2)]
        return [*trained, model.test_on_batch(x, y, return_dict=True)]

    expected = steps(reference(), X, Y)

    def work(strategy):
        rows = slice(0, 8) if strategy.rank == 0 else slice(8, 11)
        return steps(in_scope(strategy), X[rows], Y[rows])

    for results in on_ranks(ranks(2), work):
        for logs, of_one in zip(results, expected, strict=True):
            assert {key: float(value) for key, value in logs.items()} == pytest.approx(
                {key: float(value) for key, value in of_one.items()}, rel=1e-4
            )


class Returns(keras.Sequential):
    """A step with logs of its own."""

    def train_step(self, data):
        x, _ = data
        logs = super().train_step(data)
        rows = tf.shape(x)[0]
        return {**logs, "mean": tf.reduce_mean(x), "rows": rows, "mae again": logs["mae"], "text": tf.constant("a")}


def test_numbers_that_a_step_returns_are_means_weighed_by_samples(ranks):
    """Means of integers are rounded; a metric's results under other names stay its results."""

    def work(strategy):
        model = in_scope(strategy, Returns)
        seen = []
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(dict(logs)))
        model.fit(batches().take(1), shuffle=False, verbose=0, callbacks=[callback])
        return seen[0]

    for logs in on_ranks(ranks(2), work):
        assert float(logs["mean"]) == pytest.approx(float(X[:5].mean()), rel=1e-5)
        assert logs["rows"] == round((3 * 3 + 2 * 2) / 5)
        assert logs["mae again"] == logs["mae"]
        assert logs["text"] == b"a"


def test_one_replica_takes_keras_own_step(ranks):
    """Also with XLA, which host calls would rule out."""
    expected, model = reference(), in_scope(Ranked(ranks(1).groups[0]), jit_compile=True)
    for each_model in (expected, model):
        each_model.fit(batches(11), shuffle=False, verbose=0)
    assert model.jit_compile
    for weight, other in zip(expected.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5)


def test_step_keeps_name_and_doc_of_original():
    """Keras and others look at names."""

    def train_step(data):
        """Trains on a batch."""

    step = Step(None, None, train_step)
    assert (step.__name__, step.__doc__) == ("train_step", "Trains on a batch.")


def test_predict_with_ragged_outputs_raises(ranks):
    def work(strategy):
        with strategy.scope():
            inputs = keras.Input((4,))
            model = keras.Model(inputs, inputs)
        model.predict_step = lambda data: tf.RaggedTensor.from_tensor(data[0] if isinstance(data, tuple) else data)
        model.predict(X, verbose=0)

    with pytest.raises(TypeError, match=r"predict gathers only dense outputs; got RaggedTensor. Return dense tensors"):
        on_ranks(ranks(2), work)


@pytest.mark.parametrize("method", ["fit", "evaluate"])
def test_custom_step_functions_raise_and_wrapped_ones_work(ranks, method):
    name = {"fit": "make_train_function", "evaluate": "make_test_function"}[method]

    def around(self, force=False):
        return getattr(keras.Sequential, name)(self, force=force)

    def own_function(self, force=False):
        self.train_function = self.test_function = lambda iterator: {"loss": next(iterator)}

    def work(strategy):
        kinds = [type("Model", (keras.Sequential,), {name: override}) for override in (around, own_function)]
        models = [in_scope(strategy, kind) for kind in kinds]
        getattr(models[0], method)(batches(), verbose=0)
        with pytest.raises(
            TypeError, match=rf"Model.{name} makes its own step function.* Override (train|test)_step\(data\)"
        ):
            getattr(models[1], method)(batches(), verbose=0)

    on_ranks(ranks(2), work)
