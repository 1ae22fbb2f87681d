"""Moving statistics, counters and seeds under micro-batches; forward passes that are made twice."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.pipeline.models import in_stages, objective_of
from tests.sweeps import sweep
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline import schedules
from tfdist.pipeline.step import PipelinedStep

PARTS = 3
X = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
SIZES = [2, 2, 3]


class Counter(layers.Layer):
    """Counts calls, and adds up rows."""

    def build(self, _):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")
        self.first = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="only_first_replica")

    def call(self, inputs):
        self.calls.assign(self.calls + 1)
        self.rows.assign(self.rows + tf.cast(tf.shape(inputs)[0], tf.float32))
        self.first.assign(inputs[0, 0])
        return inputs


class Traced(layers.Layer):
    """Notes each time that it is traced."""

    def __init__(self, made):
        super().__init__()
        self.note = made.append  # Keras copies lists

    def call(self, inputs):
        self.note(None)
        return inputs


def run(model, steps=1, recomputes=False, schedule=schedules.one_forward_one_backward, rows=7):
    calls = ModelCalls(model)
    stages = in_stages(calls, 2)
    table = schedule(2, PARTS, stages.edges)

    @tf.function(autograph=False)
    def step(x, y):
        batch, objective = objective_of(model, table, PARTS, [x, y])
        made = PipelinedStep(stages, table, [0, 1], None, batch, [x], True, objective, recomputes=recomputes)
        made.run()
        return [batch.joined(parts) for parts in zip(*made.outputs, strict=True)], [
            made.gradients.of(variable) for variable in model.trainable_variables
        ]

    return [step(X[:rows], np.zeros((rows, model.output_shape[1]), "float32")) for _ in range(steps)]


def test_moving_statistics_are_the_mean_of_those_of_micro_batches():
    model = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(momentum=0.9), layers.Dense(2)])
    run(model)
    parts = np.split(X, np.cumsum(SIZES)[:-1])
    mean = sum(size * part.mean(0) for size, part in zip(SIZES, parts, strict=True)) / 7
    variance = sum(size * part.var(0) for size, part in zip(SIZES, parts, strict=True)) / 7
    np.testing.assert_allclose(model.layers[0].moving_mean, 0.1 * mean, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(model.layers[0].moving_variance, 0.9 + 0.1 * variance, rtol=1e-5)


def test_counters_and_sums_follow_their_aggregation():
    model = keras.Sequential([keras.Input((4,)), Counter(), layers.Dense(2)])
    run(model, steps=2)
    counter = model.layers[0]
    assert (int(counter.calls), float(counter.rows)) == (2, 14)
    np.testing.assert_allclose(counter.first, X[0, 0])


@pytest.mark.parametrize(
    "schedule", [schedules.gpipe, sweep(schedules.one_forward_one_backward), schedules.zero_bubble]
)
def test_recomputed_forward_passes_give_equal_results(schedule):
    """With Dropout and moving statistics, to the same end; and they are made."""
    runs, counts = [], []
    for recomputes in (False, True):
        keras.utils.set_random_seed(0)
        made = []
        inputs = [keras.Input((4,)), Traced(made), layers.Dense(16, "tanh"), layers.Dropout(0.5)]
        model = keras.Sequential(
            [*inputs, layers.Dense(8, activity_regularizer="l2"), layers.Dropout(0.5), layers.Dense(2)]
        )
        results = run(model, 2, recomputes, schedule)
        counts.append(len(made))
        runs.append((results, [value.numpy() for value in model.variables]))
    assert counts[1] == counts[0] + PARTS
    (plain, state), (again, other) = runs
    for value, repeated in zip(tf.nest.flatten(plain), tf.nest.flatten(again), strict=True):
        np.testing.assert_allclose(value, repeated, rtol=1e-5, atol=1e-7)
    for value, repeated in zip(state, other, strict=True):
        np.testing.assert_allclose(value, repeated, rtol=1e-6)


def test_dropout_differs_between_micro_batches_and_steps():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), layers.Dropout(0.5), layers.Dense(100, trainable=False)])
    model.layers[1].kernel.assign(np.eye(4, 100))
    first, second = (outputs[0].numpy()[:, :4] == 0 for (outputs, _) in run(model, 2))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first[:2], first[2:4])


class Noise(layers.Layer):
    """Random numbers of Keras's global seed, and a metric of its own."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean()

    def call(self, inputs):
        self.seen.update_state(keras.ops.ones(keras.ops.shape(inputs)[0]))
        return inputs * 0 + keras.random.uniform(keras.ops.shape(inputs))


def test_random_numbers_differ_and_layer_metrics_count_samples():
    model = keras.Sequential([keras.Input((4,)), Noise(), layers.Dense(4, trainable=False)])
    model.layers[1].kernel.assign(np.eye(4))
    first, second = (outputs[0].numpy() for (outputs, _) in run(model, 2))
    assert len({row.tobytes() for row in np.concatenate([first, second])}) == 14
    assert float(model.layers[0].seen.count) == 14
    run(model, rows=2)
    assert float(model.layers[0].seen.count) == 16, "a micro-batch without samples has a stand-in row"


def test_shared_dropout_works_and_shared_batch_normalization_raises():
    keras.utils.set_random_seed(0)
    dropout, inputs = layers.Dropout(0.5), keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(4, trainable=False)(dropout(layers.Identity()(dropout(inputs)))))
    model.layers[-1].kernel.assign(np.eye(4))
    ((outputs, _),) = run(model)
    zeros = (outputs[0].numpy() == 0).mean()
    assert zeros > 0.6, "each call has a mask of its own"
    inputs, shared = keras.Input((4,)), layers.BatchNormalization()
    model = keras.Model(inputs, layers.Dense(2)(shared(layers.Dense(4)(shared(inputs)))))
    with pytest.raises(ValueError, match=r"moving_mean is changed by calls in the stages \[0, 1\]"):
        run(model)


def test_layer_that_assigns_weights_in_call_raises():
    model = keras.Sequential([keras.Input((4,)), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(2)])
    with pytest.raises(ValueError, match="kernel when it is called, which does not work with micro-batches"):
        run(model)
