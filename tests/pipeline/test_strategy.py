"""`PipelineStrategy` with all stages in one process: `fit` equals plain Keras; wrong arguments."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.model_parallel.executed import executed, places
from tests.sweeps import some
from tfdist.pipeline.dry_run import DeadlockError
from tfdist.pipeline.table import Table

ROWS = 26


def network(**kwargs):
    hidden = [layers.Dense(7, "tanh", name=f"d{place}") for place in range(3)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3, name="last", **kwargs)])


@keras.saving.register_keras_serializable("tests")
class Positions(layers.Layer):
    def __init__(self, count, width, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True
        self.table = layers.Embedding(count, width)
        self.count, self.width = count, width

    def build(self, shape):
        self.table.build()

    def call(self, inputs):
        return inputs + self.table(keras.ops.arange(self.count))

    def get_config(self):
        return {"count": self.count, "width": self.width}


def tagger(middle=layers.Dense, **options):
    """A masked loss for each step of a sequence."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = Positions(5, 4)(layers.Embedding(9, 4, mask_zero=True)(inputs))
    return keras.Model(inputs, layers.Dense(3)(middle(4, name="middle", **options)(layers.Dense(4)(embedded))))


def recurrent_tagger():
    return tagger(layers.SimpleRNN, return_sequences=True)


def crossentropy(**kwargs):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **kwargs)


def sequences():
    rng = np.random.default_rng(0)
    x = rng.integers(1, 9, (ROWS, 5))
    x[:9, 2:] = 0
    return x, rng.integers(0, 3, (ROWS, 5)), rng.uniform(size=(ROWS, 5))


def vectors(rows=ROWS):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, 6)).astype("float32"), rng.normal(size=(rows, 3)), rng.uniform(size=rows)


CASES = {
    "gpipe, recomputing": (network, "mae", vectors, {"schedule": "gpipe", "stages": 3, "recompute": True}),
    "masked, ignored": (
        recurrent_tagger,
        crossentropy(ignore_class=1),
        sequences,
        {"schedule": "zero_bubble", "stages": 3},
    ),
    "sum": (network, keras.losses.MeanSquaredError("sum"), vectors, {"schedule": "zero_bubble", "stages": 3}),
    "by weights": (
        tagger,
        crossentropy(reduction="mean_with_sample_weight"),
        sequences,
        {"schedule": "1f1b", "stages": 2, "cuts": ["middle"]},
    ),
}


def trained(case, strategy=None):
    make, loss, data, _ = CASES[case]
    keras.backend.clear_session()  # for equal names
    keras.utils.set_random_seed(0)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = make()
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.3)
        metric = "mse" if make is network else "accuracy"
        # Plain Keras is eager, as it would trace longer than it trains.
        model.compile(optimizer, loss, weighted_metrics=[metric], run_eagerly=strategy is None)
    x, y, weights = data()
    if case.startswith("masked"):
        weights = None
    history = model.fit(x, y, sample_weight=weights, batch_size=9, epochs=2, validation_split=0.2, verbose=0).history
    # Batches as those of the validation, which are traced already; predictions have a partial one.
    data = tf.data.Dataset.from_tensor_slices((x, y))
    evaluated = model.evaluate(data.take(24).batch(6), verbose=0, return_dict=True)
    return history, evaluated, model.predict(data.batch(8), verbose=0), model


@pytest.mark.parametrize("case", some(CASES, 3))
def test_fit_equals_plain_keras(case, tmp_path):
    expected = trained(case)
    actual = trained(case, tfdist.PipelineStrategy(micro_batches=3, **CASES[case][3]))
    for name, values in expected[0].items():
        np.testing.assert_allclose(actual[0][name], values, rtol=1e-5, atol=1e-6, err_msg=name)
    for name, value in expected[1].items():
        np.testing.assert_allclose(actual[1][name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_allclose(actual[2], expected[2], rtol=1e-4, atol=1e-6)
    actual[3].save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    state, expected_state = ([*model.weights, *model.optimizer.variables] for model in (loaded, expected[3]))
    for variable, other in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(variable, other, rtol=1e-4, atol=1e-6, err_msg=variable.path)


OPTIMIZERS = {"SGD": lambda: keras.optimizers.SGD(0.05, 0.9), "Adam": lambda: keras.optimizers.Adam(0.01)}


@functools.cache
def after_twenty_steps(optimizer, schedule=None, stages=0):
    """The loss and the weights."""
    keras.utils.set_random_seed(0)
    strategy = None if schedule is None else tfdist.PipelineStrategy(stages=stages, micro_batches=4, schedule=schedule)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = network()
        model.compile(OPTIMIZERS[optimizer](), "mse", run_eagerly=strategy is None)
    x, y, _ = vectors(160)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(8)
    return model.fit(data, shuffle=False, verbose=0).history["loss"][0], model.get_weights()


@pytest.mark.parametrize(
    ("schedule", "stages"),
    some([(name, stages) for name in ("gpipe", "1f1b", "interleaved", "zero_bubble") for stages in (2, 4)], 3),
)
def test_weights_after_twenty_steps_equal_plain_keras(stages, schedule):
    optimizer = "SGD" if (stages == 2) == (schedule in ("gpipe", "interleaved")) else "Adam"
    loss, weights = after_twenty_steps(optimizer, schedule, stages)
    expected_loss, expected_weights = after_twenty_steps(optimizer)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    for weight, other in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_a_layer_that_two_stages_call_counts_once_in_a_norm():
    def trained(**scope):
        keras.utils.set_random_seed(0)
        with tfdist.PipelineStrategy(**scope).scope() if scope else contextlib.nullcontext():
            shared = layers.Dense(6, "tanh", name="shared")
            model = keras.Sequential([keras.Input((6,)), shared, layers.Dense(6, name="middle")])
            model = keras.Model(model.inputs, layers.Dense(3)(shared(model.outputs[0])))
            model.compile(keras.optimizers.SGD(0.05, global_clipnorm=0.1), "mse", run_eagerly=True)
        x, y, _ = vectors(8)
        model.fit(tf.data.Dataset.from_tensors((x, y)), shuffle=False, verbose=0)
        return model.get_weights()

    for weight, other in zip(trained(stages=2, micro_batches=2, cuts=["middle"]), trained(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=0, atol=1e-6)


def test_stages_on_several_devices():
    keras.utils.set_random_seed(0)
    strategy = tfdist.PipelineStrategy(
        stages=3, micro_batches=2, devices=["CPU:0", "CPU:1", "CPU:2"], cuts=["d1", "last"]
    )
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    x, y, _ = vectors()
    operations = executed(lambda: model.train_on_batch(x[:8], y[:8]))
    assert set(places(operations, "MatMul")) == {"CPU:0", "CPU:1", "CPU:2"}
    for variable in (*model.variables, *model.optimizer.variables[2:]):
        name = next(name for name in ("d0", "d1", "d2", "last") if name in variable.path)
        device = {"d0": 0, "d1": 1, "d2": 1, "last": 2}[name]
        assert variable.value.device.endswith(f"CPU:{device}"), variable.path


def test_custom_table_trains_and_deadlock_raises():
    rows = [["0F0", "0F1", "0B1", "0B0"], ["1F0", "1F1", "1B1", "1B0"]]
    strategy = tfdist.PipelineStrategy(stages=2, micro_batches=2, schedule=Table(rows, 2, 2))
    assert "worker 1" in str(strategy.schedule)
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    x, y, _ = vectors()
    model.fit(x, y, verbose=0)
    with pytest.raises(DeadlockError):
        tfdist.PipelineStrategy(
            stages=2,
            micro_batches=2,
            schedule=Table([["0F0", "0B0", "0F1", "0B1"], ["1F1", "1F0", "1B0", "1B1"]], 2, 2),
        )
    with pytest.raises(ValueError, match="the table of schedule= is for 2 stages and 2 micro-batches"):
        tfdist.PipelineStrategy(stages=2, micro_batches=4, schedule=Table(rows, 2, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, r"stages=….*at least 1; got 0"),
        ({"micro_batches": 2.5}, r"micro_batches=….*got 2.5"),
        ({"data": 2}, r"data=2\) cannot divide 1 process.*from \[1\]"),
        ({"schedule": "1F1B"}, r'schedule=….*"gpipe", "1f1b", "interleaved", "zero_bubble".*got \'1F1B\''),
        ({"cuts": "time"}, r"cuts=…"),
        ({"cuts": ["a", "b"]}, r"the cuts, .*, make 3 stages"),
        ({"devices": ["CPU:9"]}, r"expected a device of this process; got 'CPU:9'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdist.PipelineStrategy(**{"stages": 2, "micro_batches": 2, **arguments})


def test_layers_with_a_state_for_each_sample_are_refused():
    with tfdist.PipelineStrategy(stages=2, micro_batches=2).scope():
        inputs = keras.Input((5, 3), batch_size=4)
        model = keras.Model(inputs, layers.Dense(1)(layers.LSTM(2, stateful=True, name="lstm")(inputs)))
        with pytest.raises(ValueError, match="the layer lstm cannot keep a state for each sample of a batch"):
            model.compile("sgd", "mse")
