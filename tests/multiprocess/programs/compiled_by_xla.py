"""Steps that XLA compiles, on several processes; a check for each name in TEST_CASES."""

import keras
import numpy as np
import tensorflow as tf
from checking import run_checks
from comparing import assert_alike

import tfdist
from tfdist.strategies.keras import compiled_functions

layers = keras.layers
tfdist.init()
strategy = tfdist.AllReduceStrategy(devices=["CPU:0"])
rank, size = strategy.rank, strategy.size
generator = np.random.default_rng(0)
X, TOKENS = generator.normal(size=(22, 7)).astype("float32"), generator.integers(0, 12, (22, 6))
Y = generator.normal(size=(22, 2)).astype("float32")
call, calls = compiled_functions.call, []
compiled_functions.call = lambda *given: calls.append(1) or call(*given)


class OwnStep(keras.Sequential):
    """Has a step of its own, of which XLA compiles the model."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def dense(kind=keras.Sequential):
    regular = {"kernel_regularizer": "l2", "activity_regularizer": "l1"}
    return kind([layers.Input((7,)), layers.Dense(8, "tanh", **regular), layers.BatchNormalization(), layers.Dense(2)])


def words():
    """Gradients of an embedding are sparse."""
    return keras.Sequential([layers.Input((6,)), layers.Embedding(12, 4), layers.LSTM(4), layers.Dense(2)])


def slow():
    """XLA takes seconds to compile its steps one by one."""
    return keras.Sequential([layers.Input((20, 1)), layers.LSTM(4, unroll=True), layers.Dense(2)])


def trained(make, x, jit_compile, optimizer=lambda: keras.optimizers.SGD(0.05, momentum=0.9), epochs=2):
    """Batches of 8, 8 and 6 rows, which processes share in several ways."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make()
        model.compile(optimizer(), "mse", metrics=["mae"], jit_compile=jit_compile)
    history = model.fit(x, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, validation_data=(x, Y)).history
    assert_alike(model)
    return np.concatenate([*map(np.ravel, model.get_weights()), *map(np.ravel, history.values())])


def assert_equal(make, x, **how):
    calls.clear()
    with_xla = trained(make, x, True, **how)
    assert calls, "XLA has compiled nothing"
    np.testing.assert_allclose(with_xla, trained(make, x, False, **how), rtol=0, atol=1e-5)


def models():
    assert_equal(dense, X)


def more_models():
    assert_equal(words, TOKENS)
    assert_equal(lambda: dense(OwnStep), X)
    accumulating = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.5}
    assert_equal(dense, X, optimizer=lambda: keras.optimizers.SGD(0.05, **accumulating))
    assert_equal(dense, X, optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05)))


def waiting():
    """One process compiles, for seconds, while the others wait in the sum of its first step."""
    x = generator.normal(size=(22, 20, 1)).astype("float32")
    last = trained(slow, x, rank == size - 1, epochs=1)
    np.testing.assert_allclose(last, trained(slow, x, False, epochs=1), rtol=0, atol=1e-5)


run_checks(globals())
