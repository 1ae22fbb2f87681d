"""On one process; `tests/multiprocess/test_delayed.py` has several."""

import keras
import numpy as np
import pytest

import tfdist

X = np.random.default_rng(0).normal(size=(12, 3))


def linear(optimizer=None, strategy=None):
    with (strategy or tfdist.AllReduceStrategy(delay=1)).scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(0.1), "mse")
    return model


def test_updates_are_a_step_late():
    model = linear()
    model.train_on_batch(X, X[:, :1])
    assert int(model.optimizer.iterations) == 0
    assert not model.get_weights()[0].any()
    model.train_on_batch(X, X[:, :1])
    first = model.get_weights()[0]
    plain = linear(strategy=tfdist.AllReduceStrategy())
    plain.train_on_batch(X, X[:, :1])
    np.testing.assert_allclose(first, plain.get_weights()[0], rtol=1e-6)
    model.evaluate(X, X[:, :1], verbose=0)  # makes the second update, with the gradient of the same weights
    np.testing.assert_allclose(model.get_weights()[0], 2 * first, rtol=1e-6)
    assert int(model.optimizer.iterations) == 2


def test_sums_in_float32_update_variables_of_half_precision():
    strategy = tfdist.AllReduceStrategy(delay=1, float32_sums=True)
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="zeros", dtype="bfloat16")
        model = keras.Sequential([keras.layers.Input((3,)), dense])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    before = model.get_weights()
    model.fit(X, X[:, :1], batch_size=6, verbose=0)
    assert int(model.optimizer.iterations) == 2
    assert model.weights[0].dtype == "bfloat16"
    assert (model.get_weights()[0] != before[0]).all()


def test_predict_applies_the_delayed_update_first():
    model = linear()
    model.train_on_batch(X, X[:, :1])
    assert model.predict(X, verbose=0).any()


def test_an_epoch_ends_with_its_last_update():
    seen = []

    class Look(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(int(self.model.optimizer.iterations))

    linear().fit(X, X[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=[Look()])
    assert seen == [3, 6]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "with loss scaling of the optimizer"),
        (lambda: keras.optimizers.SGD(gradient_accumulation_steps=2), "with gradient_accumulation_steps of"),
    ],
)
def test_incompatible_optimizer_options_raise(optimizer, message):
    with pytest.raises(ValueError, match=message):
        linear(optimizer).fit(X, X[:, :1], verbose=0)
