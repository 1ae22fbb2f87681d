"""Logs that steps compute from results of metrics."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import on_ranks
from tfdist.strategies.keras.derived_logs import derived

rng = np.random.default_rng(0)
X = rng.normal(size=(21, 4))
Y = (X.sum(1, keepdims=True) + rng.normal(size=(21, 1)) > 0).astype(float)


def of_graph(function):
    """Returns what is known of a log that a function computes from two results and from another tensor."""
    known = []

    @tf.function
    def step(first, second, other):
        results = {id(first): ("precision", ()), id(second): ("recall", ())}
        log = function(first, second, other)
        known.append(derived(log, lambda tensor: results.get(id(tensor))))
        return log

    specs = [tf.TensorSpec([], tf.float64)] * 3
    step.get_concrete_function(*specs)
    return known[0]


def test_log_is_computed_anew_from_other_results():
    f1 = of_graph(lambda p, r, _: 2 * p * r / (p + r))
    assert sorted(f1.sources) == [("precision", ()), ("recall", ())]
    values = {"precision": 0.5, "recall": 0.25}
    given = [tf.constant(values[name], tf.float64) for name, _ in f1.sources]
    assert float(f1.compute(*given)) == pytest.approx(1 / 3)
    assert float(tf.function(f1.compute)(*given)) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda p, r, other: p + other,
        lambda p, r, other: other * 2,
        lambda p, r, other: p + tf.random.uniform([], dtype=tf.float64),
        lambda p, r, other: tf.constant(3.0),
    ],
)
def test_log_of_other_values_is_not_derived(function):
    assert of_graph(function) is None


def test_nothing_is_known_of_eager_tensors():
    assert derived(tf.constant(1.0), {}.get) is None


class Scores(keras.Sequential):
    """Returns scores that it computes from metrics, in its own step and in `compute_metrics`."""

    def test_step(self, data):
        logs = super().test_step(data)
        p, r = logs["precision"], logs["recall"]
        assert not tf.executing_eagerly()
        return {**logs, "f1": 2 * p * r / (p + r + 1e-12), "perplexity": tf.exp(logs["loss"])}

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "percent": 100 * results["recall"]}


def evaluated(trains):
    model = Scores([keras.layers.Input((4,)), keras.layers.Dense(1, "sigmoid")])
    metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
    model.compile("sgd", "binary_crossentropy", metrics=metrics)
    model.set_weights([np.array([[1.0], [0.5], [-0.5], [0.2]]), np.zeros(1)])
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    if trains:
        return {name: values[-1] for name, values in model.fit(data, verbose=0).history.items()}
    return {name: float(log) for name, log in model.evaluate(data, verbose=0, return_dict=True).items()}


@pytest.mark.parametrize("trains", [False, True])
def test_logs_of_all_ranks_are_those_of_one_process(ranks, trains):
    def on_rank(strategy):
        with strategy.scope():
            return evaluated(trains)

    expected = evaluated(trains)
    assert "percent" in expected
    for logs in on_ranks(ranks(2), on_rank):
        assert logs == pytest.approx(expected, rel=1e-5)


class Evaluates(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.evaluate(X, Y, verbose=0)


def test_logs_are_those_of_their_step_where_a_callback_takes_others(ranks):
    """These have more logs."""

    def on_rank(strategy):
        with strategy.scope():
            model = Scores([keras.layers.Input((4,)), keras.layers.Dense(1, "sigmoid")])
            metrics = [keras.metrics.Precision(name="precision"), keras.metrics.Recall(name="recall")]
            model.compile("sgd", "binary_crossentropy", metrics=metrics)
        return model.fit(X, Y, batch_size=32, verbose=0, callbacks=[Evaluates()]).history

    first, second = on_ranks(ranks(2), on_rank)
    assert first == second
    assert first["percent"] == pytest.approx([100 * first["recall"][0]])
