"""Models that are trained in stages learn, report and predict what the whole ones do: `fit` of both, in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.pipeline import models
from tests.sweeps import some
from tfdist.model_parallel.model_calls import ModelCalls
from tfdist.pipeline import schedules
from tfdist.pipeline.dry_run import DeadlockError
from tfdist.pipeline.model_steps import ModelSteps
from tfdist.pipeline.table import Table

STAGES, PARTS = 2, 3
ROWS = 26
"""Batches of 8 and a last one of 2, which is fewer than there are micro-batches."""
WHOLE = 13
"""Rows of batches that are all whole, and so traced once: where a schedule or a loss matters, not the batches."""


def split(model, schedule="gpipe", recomputes=False):
    """Has a compiled model make its steps in stages."""
    stages = models.in_stages(ModelCalls(model), STAGES)
    make = {"gpipe": schedules.gpipe, "1f1b": schedules.one_forward_one_backward, "zb": schedules.zero_bubble}[schedule]
    table = make(STAGES, PARTS, stages.edges)
    devices = [f"/device:CPU:{number}" for number in range(STAGES)]
    steps = ModelSteps(model, stages, table, range(STAGES), None, devices, recomputes)
    model.train_step, model.test_step, model.predict_step = steps.train, steps.test, steps.predict
    return model


def network(*hidden, outputs=1, **kwargs):
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(8, "tanh"), layers.Dense(outputs, **kwargs)])


def regularized():
    l2 = keras.regularizers.L2(0.05)
    hidden = layers.Dense(8, kernel_regularizer=l2, activity_regularizer="l1")
    return network(hidden, kernel_regularizer="l1", bias_regularizer=l2)


def frozen():
    return network(layers.Dense(8, trainable=False), layers.Dense(7))


def classifier():
    return network(layers.Dense(8, "relu"), outputs=3, activation="softmax")


def with_momentum():
    """An optimizer that has slots, and less to trace than Adam."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


CASES = {
    "sgd": (network, {"optimizer": "sgd", "loss": "mse"}),
    "adam, decay, average": (network, {"optimizer": lambda: keras.optimizers.AdamW(use_ema=True), "loss": "mae"}),
    "clipped": (network, {"optimizer": lambda: keras.optimizers.SGD(global_clipnorm=0.1), "loss": "mse"}),
    "accumulated": (
        network,
        {"optimizer": lambda: keras.optimizers.SGD(0.05, 0.9, gradient_accumulation_steps=2), "loss": "huber"},
    ),
    "regularized": (regularized, {"optimizer": with_momentum, "loss": "mse"}),
    "frozen": (frozen, {"optimizer": with_momentum, "loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}),
    "eager": (network, {"optimizer": "sgd", "loss": "mse", "run_eagerly": True}),
    "several steps": (network, {"optimizer": "sgd", "loss": "mse", "steps_per_execution": 2}),
    "scaled": (
        network,
        {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), 2.0**7), "loss": "mse"},
    ),
    "several": (
        models.several_outputs,
        {
            "optimizer": with_momentum,
            "loss": {"early": "mse", "late": "mae"},
            "loss_weights": {"early": 0.3, "late": 2.0},
        },
    ),
    "shared": (models.shared, {"optimizer": with_momentum, "loss": "mse", "metrics": ["mae"]}),
    "words": (models.words, {"optimizer": "adam", "loss": "mse"}),
}


def data_of(model):
    x, y = models.data_of(model, ROWS)
    x = [tensor.numpy() for tensor in x]
    y = [tensor.numpy() for tensor in y]
    return (x if len(x) > 1 else x[0]), (dict(zip(model.output_names, y, strict=True)) if len(y) > 1 else y[0])


def trained(make, compiled, schedule=None, batch_size=8, predicts=True):
    keras.utils.set_random_seed(0)
    model = make()
    optimizer = compiled["optimizer"]
    model.compile(**{**compiled, "optimizer": optimizer() if callable(optimizer) else optimizer})
    model.optimizer.build(model.trainable_variables)  # where the step makes its variables, Keras traces it twice
    if schedule is not None:
        split(model, schedule)
    x, y = data_of(model)
    data = tf.data.Dataset.from_tensor_slices((tuple(x) if isinstance(x, list) else x, y)).batch(batch_size)
    history = model.fit(data, validation_data=data, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(data, return_dict=True, verbose=0)
    state = [variable.numpy() for variable in (*model.variables, *model.optimizer.variables)]
    return history, evaluated, keras.tree.flatten(model.predict(data, verbose=0)) if predicts else [], state


def plain(make, compiled, **options):
    """A reference of Keras, which is eager, as it would trace longer than it trains.

    Several outputs are not: eagerly, Keras weighs their losses by samples, and in graphs logs have the mean of batches.
    """
    return trained(make, {"run_eagerly": make is not models.several_outputs, **compiled}, **options)


def assert_equal(actual, expected):
    assert actual[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        np.testing.assert_allclose(actual[0][name], values, rtol=1e-5, err_msg=name)
    for name, value in expected[1].items():
        np.testing.assert_allclose(actual[1][name], value, rtol=1e-5, err_msg=name)
    for array, other in zip(actual[2] + actual[3], expected[2] + expected[3], strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", some(CASES, 6, first=3))
def test_fit_evaluate_and_predict_equal_plain_keras(name):
    make, compiled = CASES[name]
    schedule = "gpipe" if len(name) % 2 else "1f1b"
    assert_equal(trained(make, compiled, schedule), plain(make, compiled))


def test_weights_of_samples_and_classes():
    labels = np.random.default_rng(0).integers(0, 3, ROWS)
    weights = np.random.default_rng(1).uniform(size=ROWS)
    results = []
    for schedule in (None, "zb"):
        keras.utils.set_random_seed(0)
        model = classifier()
        model.compile(
            with_momentum(),
            "sparse_categorical_crossentropy",
            metrics=["accuracy"],
            weighted_metrics=["accuracy"],
            run_eagerly=schedule is None,
        )
        model.optimizer.build(model.trainable_variables)
        if schedule is not None:
            split(model, schedule)
        x, _ = data_of(model)
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        with_sample_weight = model.fit(x, labels, sample_weight=weights, **options).history
        with_class_weight = model.fit(x, labels, class_weight={0: 1.0, 1: 3.0, 2: 0.1}, **options).history
        results.append((with_sample_weight, with_class_weight, [variable.numpy() for variable in model.variables]))
    for whole, pipelined in zip(*results, strict=True):
        for value, expected in zip(keras.tree.flatten(whole), keras.tree.flatten(pipelined), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_custom_loss_over_whole_batch_equals_plain_keras():
    """Contrasts samples with each other, which only a schedule with all forward passes first can do."""

    def contrast(y, outputs):
        near = keras.ops.matmul(outputs, keras.ops.transpose(outputs))
        return keras.ops.mean(keras.ops.logsumexp(near, axis=1))

    compiled = {"optimizer": with_momentum, "loss": contrast}
    assert_equal(trained(classifier, compiled, "gpipe", predicts=False), plain(classifier, compiled, predicts=False))


class OwnLoss(keras.Model):
    """Computes its loss, with a weight of the last stage."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean((y - y_pred) ** 2) + 0.1 * keras.ops.sum(self.layers[-1].kernel ** 2)


@pytest.mark.parametrize("schedule", some(["zb", "gpipe", "1f1b"], 3))
def test_custom_compute_loss_equals_plain_keras(schedule):
    def make():
        inputs = keras.Input((6,))
        return OwnLoss(inputs, layers.Dense(1)(layers.Dense(5, "relu")(inputs)))

    compiled, options = {"optimizer": with_momentum}, {"batch_size": WHOLE, "predicts": False}
    assert_equal(trained(make, compiled, schedule, **options), plain(make, compiled, **options))


def test_deadlocking_table_raises():
    model = network()
    stages = models.in_stages(ModelCalls(model), 2)
    table = Table([["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]], 2, 2, stages.edges)
    with pytest.raises(DeadlockError, match="worker 0 cannot run 0B0 before 1B0"):
        ModelSteps(model, stages, table, [0, 1], None)


def test_custom_table_with_unusual_order_equals_plain_keras():
    rows = [["0F1", "0F0", "0F2", "0B2", "0B0", "0B1"], ["1F2", "1F1", "1F0", "1B2", "1B0", "1B1"]]

    def pipelined():
        model = network()
        stages = models.in_stages(ModelCalls(model), 2)
        steps = ModelSteps(model, stages, Table(rows, 2, 3, stages.edges), [0, 1], None)
        model.train_step, model.predict_step = steps.train, steps.predict
        return model

    compiled = {"optimizer": with_momentum, "loss": "mse", "metrics": ["mae"]}
    assert_equal(trained(pipelined, compiled, batch_size=WHOLE), plain(network, compiled, batch_size=WHOLE))
