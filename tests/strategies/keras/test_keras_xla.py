import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, RankedLocal, on_ranks
from tests.sweeps import sweep
from tfdist.strategies.keras import compiled_functions

layers = keras.layers
call = compiled_functions.call
X = np.random.default_rng(0).normal(size=(11, 6)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, 11)
LOSS = "sparse_categorical_crossentropy"
WORDS = np.random.default_rng(2).integers(0, 7, (11, 5))


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """Counts what is compiled."""
    counted = []
    monkeypatch.setattr(compiled_functions, "call", lambda *given: counted.append(1) or call(*given))
    return counted


class OwnSteps(keras.Model):
    """Takes steps as Keras does, but its own ones."""

    def train_step(self, data):
        """As Keras's."""
        x, y = data
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            loss = self.compute_loss(x, y, outputs)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return self.compute_metrics(x, y, outputs)


class Penalty(layers.Layer):
    """Adds to the loss."""

    def call(self, given):
        """Passes on what it is given."""
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(given)))
        return given


class Lengths(layers.Layer):
    """How long strings are."""

    def call(self, given):
        """A number for each of them."""
        return tf.cast(tf.strings.length(given), tf.float32)


class OwnLoss(keras.Model):
    """Updates a metric where it computes its loss."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.size = keras.metrics.Mean("size")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        """Adds the size of outputs."""
        size = keras.ops.mean(keras.ops.square(y_pred))
        self.size.update_state(size)
        return super().compute_loss(x, y, y_pred, sample_weight) + size


def dense(kind=keras.Model, *inner, **arguments):
    inputs = hidden = keras.Input((6,))
    for layer in (layers.Dense(5, "tanh", kernel_regularizer="l2", activity_regularizer="l1"), *inner):
        hidden = layer(hidden)
    model = kind(inputs=inputs, outputs=layers.Dense(3, "softmax")(hidden))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=1.0, **arguments)
    return model, optimizer, X


def of_words(kind=keras.Model, *inner, mask=False):
    """Words are embedded, which has sparse gradients; a mask needs a layer that takes it."""
    inputs = keras.Input((5,), dtype="int32")
    hidden = layers.Embedding(7, 4, mask_zero=mask)(inputs)
    for layer in (layers.LSTM(4) if mask else layers.Flatten(), *inner):
        hidden = layer(hidden)
    model = kind(inputs=inputs, outputs=layers.Dense(3, "softmax", kernel_regularizer="l2")(hidden))
    return model, keras.optimizers.Adagrad(0.1), WORDS


def scaled():
    model, optimizer, x = dense()
    return model, keras.optimizers.LossScaleOptimizer(optimizer), x


MODELS = {
    "everything": lambda: of_words(OwnLoss, layers.BatchNormalization(), Penalty()),
    "own steps": lambda: dense(OwnSteps, layers.BatchNormalization(), Penalty()),
    "synchronized": lambda: dense(keras.Model, layers.BatchNormalization(synchronized=True)),
    "accumulated": lambda: dense(gradient_accumulation_steps=2),
    "masks": lambda: of_words(mask=True),
    "scaled": scaled,
}


def trained(strategy, make, jit_compile, is_whole=False, **arguments):
    """Returns everything that a training ends with, as one vector.

    Args:
        strategy: strategy to train under.
        make: makes a model and an optimizer, and has data for them.
        jit_compile: argument of ``compile``.
        is_whole: whether there are metrics, a partial batch, evaluations and predictions. XLA compiles each number of
            rows anew, which is most of what this costs: so evaluations and predictions have one batch.
        arguments: other arguments of ``compile``.
    """
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer, x = make()
        for number, weight in enumerate(model.weights):  # ranks are threads, which share Keras's seed
            drawn = np.random.default_rng(number).normal(size=weight.shape)
            weight.assign(np.abs(drawn) if "variance" in weight.path else drawn)
        metrics = ["accuracy", keras.metrics.SparseCategoricalCrossentropy()] if is_whole else []
        model.compile(optimizer, LOSS, metrics=metrics, jit_compile=jit_compile, **arguments)
    rows = tf.data.Dataset.from_tensor_slices((x, Y))
    few = rows.take(3).batch(3) if is_whole else None
    data, given = rows.take(7 if is_whole else 8).batch(4), {"epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(data, validation_data=few, **given).history
    ended = [*model.get_weights(), *history.values()]
    if is_whole:
        ended.append(model.predict(few, verbose=0))
    return np.concatenate([np.ravel(array) for array in ended])


def check_equal(strategy, make, **arguments):
    """Compares with eager steps, as a graph without XLA would take longer to trace than it trains."""
    expected = trained(strategy, make, jit_compile=False, run_eagerly=True, **arguments)
    result = trained(strategy, make, jit_compile=True, **arguments)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


def test_weights_logs_evaluations_and_predictions_are_those_without_xla(ranks, compiled, caplog):
    """Batches have 4 and 3 rows, of which ranks get 2 and 2, or 2 and 1. `OwnLoss` is seen to add to its metric."""
    on_ranks(ranks(2), lambda strategy: check_equal(strategy, MODELS["everything"], is_whole=True))
    assert compiled
    assert not [record.message for record in caplog.records if "is overwritten in a step" in record.message]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("scaled", {"steps_per_execution": 2}),
        *(sweep(name, {}) for name in ("own steps", "synchronized", "accumulated", "masks")),
    ],
)
def test_more_models_train_equally_with_xla(ranks, name, arguments, compiled):
    on_ranks(ranks(2), lambda strategy: check_equal(strategy, MODELS[name], **arguments))
    assert compiled


@pytest.mark.parametrize("name", ["synchronized", sweep("everything"), sweep("own steps")])
def test_two_devices_train_equally_with_xla(ranks, name, compiled, caplog):
    check_equal(Ranked(ranks(1).groups[0], devices=("CPU:1", "CPU:2")), MODELS[name])
    assert compiled
    reasons = [record.message for record in caplog.records if "XLA" in record.message]
    assert len(reasons) == (name == "synchronized"), reasons
    assert all("such as a collective" in reason for reason in reasons)


@pytest.mark.parametrize("name", ["own steps", sweep("everything"), sweep("synchronized")])
def test_one_rank_compiles_and_the_other_does_not(ranks, name, compiled):
    """As where one has a GPU: they call the same collectives, and end with equal weights."""
    made = MODELS[name]
    results = on_ranks(ranks(2), lambda strategy: trained(strategy, made, jit_compile=bool(strategy.rank)))
    np.testing.assert_array_equal(*results)
    assert compiled


def test_local_sgd_trains_equally_with_xla(ranks, compiled):
    ranks(2)(lambda group: check_equal(RankedLocal(group), lambda: dense(OwnSteps)))
    assert compiled


def test_weighted_means_are_of_all_ranks(ranks, compiled, caplog):
    """Their divisor is summed in the middle of the step, which is why XLA does not compile it."""

    def work(strategy):
        ended = []
        for jit_compile in (False, True):
            with strategy.scope():
                model = keras.Sequential([keras.Input((6,)), layers.Dense(3, "softmax", kernel_initializer="ones")])
                loss = keras.losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight")
                model.compile("sgd", loss, jit_compile=jit_compile, run_eagerly=not jit_compile)
            model.fit(tf.data.Dataset.from_tensor_slices((X, Y, np.arange(11.0))).batch(4), shuffle=False, verbose=0)
            ended.append(model.get_weights()[0])
        np.testing.assert_allclose(ended[1], ended[0], rtol=0, atol=1e-6)

    on_ranks(ranks(2), work)
    assert compiled
    assert sum("XLA does not compile" in record.message for record in caplog.records) == 1


def test_string_inputs_are_logged_and_not_compiled(ranks, compiled, caplog):
    with Ranked(ranks(1).groups[0], devices=("CPU:0", "CPU:1")).scope():
        model = keras.Sequential([keras.Input((2,), dtype="string"), Lengths(), layers.Dense(1)])
        model.compile("sgd", "mse", jit_compile=True)
    model.fit(tf.data.Dataset.from_tensors(([["a", "b"]] * 4, np.ones(4))), verbose=0)
    assert not compiled
    assert sum("no ragged or sparse tensors, and no strings" in record.message for record in caplog.records) == 1


def test_auto_is_keras_own_choice(ranks, monkeypatch, caplog):
    """Beside a GPU that there is not. Steps of one's own are left alone, and what cannot be compiled for Keras."""
    gpus = [types.SimpleNamespace(device_type="GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: gpus if kind != "CPU" else [])

    def chosen(strategy, kind=keras.Model, jit_compile="auto", **arguments):
        with strategy.scope():
            model = dense(kind)[0]
            model.compile("sgd", "mse", jit_compile=jit_compile, **arguments)
        return model.jit_compile

    def choices(strategy):
        return [
            *(chosen(strategy), chosen(strategy, OwnSteps), chosen(strategy, OwnSteps, jit_compile=True)),
            *(chosen(strategy, jit_compile=False), chosen(strategy, run_eagerly=True)),
        ]

    assert choices(Ranked(ranks(1).groups[0])) == [True, True, True, False, False]
    assert on_ranks(ranks(2), choices) == [[True, False, True, False, False]] * 2
    assert not caplog.records


def test_without_a_gpu_auto_is_off(ranks):
    with Ranked(ranks(1).groups[0]).scope():
        model = dense()[0]
        model.compile("sgd", "mse")
    assert model.jit_compile is False
