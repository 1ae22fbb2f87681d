"""Non-trainable weights of workers whose parameter servers are threads of this process."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.served import served

X = np.random.default_rng(0).normal(size=(48, 4)).astype("float32")
Y = X[:, :2] ** 2


def model_in(strategy, seed, run_eagerly=True):
    """A normalization, a frozen layer, moving statistics, and a seed generator; all of them by the seed."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        normalization = keras.layers.Normalization()
        normalization.adapt(X * (seed + 1))
        layers = [normalization, keras.layers.Dense(3, trainable=False), keras.layers.BatchNormalization()]
        last = [keras.layers.Dropout(0.1, seed=seed), keras.layers.Dense(2)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers, *last])
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    return model


def fit(model, *callbacks, scale=1.0):
    data = tf.data.Dataset.from_tensor_slices((scale * X, Y)).batch(32)
    model.fit(data, shuffle=False, verbose=0, callbacks=list(callbacks))


def values(model):
    return [variable.numpy() for variable in model.non_trainable_weights]


def assert_equal(arrays, expected):
    for mine, its in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(mine, its)


class Before(keras.callbacks.Callback):
    """Keeps the non-trainable weights before the first batch."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 0:
            self.values = values(self.model)


@pytest.mark.parametrize("eager", [False, True])
def test_worker_starts_with_chiefs_non_trainable_weights(eager, caplog):
    """Also with what Keras has made constants of in a graph."""
    caplog.set_level(logging.INFO, "tfdist")
    with served(workers=2) as strategies:
        chief, worker = (model_in(strategy, seed, eager) for seed, strategy in enumerate(strategies))
        chief.layers[2].moving_mean.assign([1.0, 2.0, 3.0])
        expected, before = values(chief), Before()
        worker.predict(X, verbose=0)
        fit(chief)
        fit(worker, before)
        assert_equal(before.values, expected)
        chief_output, worker_output = (
            keras.Sequential(model.layers[:2]).predict(X, verbose=0) for model in (chief, worker)
        )
        np.testing.assert_array_equal(chief_output, worker_output)
        np.testing.assert_allclose(worker.predict(X, verbose=0), worker(X), rtol=1e-5)
        seeds = [int(model.layers[3].seed_generator.state.numpy()[0]) for model in (chief, worker)]
        assert seeds == [0, 1], "they would drop the same units"
    assert "differed from the chief's: this worker begins with the chief's" in caplog.text


def test_worker_keeps_own_statistics_after_start():
    with served(workers=2) as strategies:
        chief, worker = (model_in(strategy, 0) for strategy in strategies)
        fit(chief)
        fit(worker, scale=2.0)
        state, before = values(worker), Before()
        assert not np.array_equal(state[-1], values(chief)[-1]), "moving statistics of other data"
        fit(worker, before)
        assert_equal(before.values, state)


def test_late_worker_gets_statistics_from_chiefs_last_epoch():
    with served(workers=2) as strategies:
        chief, worker = (model_in(strategy, seed) for seed, strategy in enumerate(strategies))
        fit(chief)
        expected, before = values(chief), Before()
        fit(chief)
        fit(worker, before)
        assert_equal(before.values, expected)


def test_frozen_layers_keep_values_updated_by_servers():
    """A layer that is frozen after it was trained has the newest values."""
    with served(workers=2) as strategies:
        models = [model_in(strategy, 0) for strategy in strategies]
        for model in models:
            fit(model)
        for model in models:
            model.layers[-1].trainable = False
            model.layers[1].trainable = True
            model.compile("adam", "mse", run_eagerly=True)
        fit(models[0])
        fit(models[1])
        assert_equal(*(model.layers[-1].get_weights() for model in models))


def test_weights_updated_by_servers_are_not_assigned():
    with served(workers=2) as strategies:
        chief, worker = (model_in(strategy, seed) for seed, strategy in enumerate(strategies))
        kept, taken = worker.layers[1].weights
        before = kept.numpy()
        chief.layers[1].set_weights([np.zeros((4, 3)), np.ones(3)])
        for model, updated in ((chief, ()), (worker, {id(kept)})):
            model.distribute_strategy.extended._begun.states.begin(model, updated)
        np.testing.assert_array_equal(kept.numpy(), before)
        np.testing.assert_array_equal(taken.numpy(), np.ones(3))
