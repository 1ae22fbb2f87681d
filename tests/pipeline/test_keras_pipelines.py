"""Keras's methods of models in stages: their weights, files, callbacks, and what cannot be divided."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.pipeline import models
from tfdist.strategies.divided.described_variables import is_described

X = np.random.default_rng(0).normal(size=(12, 6)).astype("float32")
Y = X[:, :3] * 2


def network():
    hidden = [layers.Dense(4, name=f"d{place}") for place in range(4)]
    return keras.Sequential([keras.Input((6,)), *hidden, layers.Dense(3)])


def test_compile_raises_for_indivisible_models():
    strategy = tfdist.PipelineStrategy(stages=9, micro_batches=2)
    with strategy.scope(), pytest.raises(ValueError, match=r"9 stages need at least as many calls .* makes 5"):
        network().compile("sgd", "mse")
    with strategy.scope():

        class Own(keras.Model):
            def call(self, x):
                return x

        with pytest.raises(ValueError, match="Own, which has no graph of layers"):
            Own().compile("sgd", "mse")


def test_custom_train_step_raises():
    class Own(keras.Model):
        def train_step(self, data):
            return {}

    strategy = tfdist.PipelineStrategy(stages=2, micro_batches=2)
    with strategy.scope():
        inputs = keras.Input((6,))
        model = Own(inputs, layers.Dense(3)(layers.Dense(2)(inputs)))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Own has its own train_step"):
        model.fit(X, Y, verbose=0)


def test_eager_steps_divide_arrays_as_graphs_divide_tensors():
    """Keras makes tensors of a batch's arrays in graphs only."""
    found = []
    for strategy, eager in ((tfdist.PipelineStrategy(stages=2, micro_batches=2), True), (None, False)):
        keras.utils.set_random_seed(0)
        with (strategy or tf.distribute.get_strategy()).scope():
            model = network()
            model.compile("sgd", "mse", run_eagerly=eager)
        weights = np.arange(8.0)
        logs = [model.train_on_batch(X[:8], Y[:8], weights), model.test_on_batch(X[:8], Y[:8], weights)]
        found.append([*logs, *model.get_weights()])
    for value, expected in zip(*found, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_weights_can_be_read_and_set():
    keras.utils.set_random_seed(0)
    expected = models.skips().get_weights()
    keras.utils.set_random_seed(0)
    strategy = tfdist.PipelineStrategy(stages=2, micro_batches=2)
    with strategy.scope():
        model = models.skips()
    for weight, other in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(weight, other)
    model.set_weights([2 * weight for weight in expected])
    np.testing.assert_array_equal(model.get_weights()[0], 2 * expected[0])
    assert model.predict_on_batch(np.ones([3, 6])).shape == (3, 2)


def test_a_sequential_model_is_divided_when_its_first_batch_comes():
    keras.utils.set_random_seed(0)
    strategy = tfdist.PipelineStrategy(stages=2, micro_batches=2)
    with strategy.scope():
        model = keras.Sequential([layers.Dense(4, "relu"), layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=True)
    history = model.fit(X, Y, batch_size=4, epochs=3, verbose=0).history["loss"]
    assert history[-1] < history[0]
    assert model.jit_compile is False, "XLA compiles no calls of the host"
    assert not any(is_described(variable) for variable in (*model.variables, *model.optimizer.variables))


def test_files_of_plain_keras_are_loaded_into_stages(tmp_path):
    plain = network()
    plain.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    plain.run_eagerly = True  # and not the models that are loaded
    plain.fit(X, Y, verbose=0)
    plain.save(tmp_path / "plain.keras")
    plain.save_weights(tmp_path / "plain.weights.h5")
    strategy = tfdist.PipelineStrategy(stages=3, micro_batches=2)
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "plain.keras")
        weights_only = network()
    weights_only.load_weights(tmp_path / "plain.weights.h5")
    for model, expected in ((loaded, plain.variables + plain.optimizer.variables), (weights_only, plain.variables)):
        variables = model.variables + (model.optimizer.variables if model is loaded else [])
        for variable, other in zip(variables, expected, strict=True):
            np.testing.assert_array_equal(variable, other)
    loaded.fit(X, Y, verbose=0)
    plain.fit(X, Y, verbose=0)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loaded.predict_on_batch(X), plain.predict_on_batch(X), rtol=1e-5, atol=1e-6)


def test_early_stopping_restores_the_best_weights():
    strategy = tfdist.PipelineStrategy(stages=2, micro_batches=2)
    with strategy.scope():
        model = network()
        model.compile(keras.optimizers.SGD(50.0), "mse")  # gets worse with each epoch
    kept = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: kept.append(model.get_weights()))
    stopping = keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)
    model.fit(X, Y, epochs=9, callbacks=[keep, stopping], verbose=0)
    assert len(kept) == 3
    for weight, other in zip(model.get_weights(), kept[0], strict=True):
        np.testing.assert_array_equal(weight, other)


def test_fit_raises_if_batch_size_is_indivisible():
    strategy = tfdist.PipelineStrategy(stages=2, micro_batches=3)
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"batches of 10 samples .* Batches of 9 and 12"):
        model.fit(X, Y, batch_size=10, verbose=0)
