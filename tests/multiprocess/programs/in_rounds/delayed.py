"""`AllReduceStrategy(delay=1)` against NumPy, and with what Keras has; a check for each name in TEST_CASES."""

import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from common import Sets, batched, dealt, gradient
from comparing import assert_alike, assert_close
from interrupting import Interrupts
from own_steps import Gan, stepping

import tfdist

FOLDER = sys.argv[1]
ROWS, BATCH, EPOCHS = 64, 10, 3  # a last batch of 4 rows, of which some processes have fewer, or none
RATE = 1 / 16

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
generator = np.random.default_rng(0)
X = generator.normal(size=(ROWS, 5))
Y = X @ generator.normal(size=(5, 3)) + 0.1 * generator.normal(size=(ROWS, 3))
START = [generator.normal(size=(5, 3)), generator.normal(size=3)]


def strategy(**arguments):
    return tfdist.AllReduceStrategy(**{"devices": ["CPU:0"], "delay": 1, **arguments})


def linear(made, momentum=0.0, optimizer=None, **compiling):
    with made.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(RATE, momentum=momentum), "mse", **compiling)
    model.set_weights(START)
    return model


def fit(model, epochs=EPOCHS, **how):
    return model.fit(batched(X, Y, BATCH), epochs=epochs, verbose=0, **how).history


class Late:
    """Momentum with gradients that are a step late; an epoch's last one is used at its end."""

    def __init__(self, momentum=0.0, clip=None):
        self.weights, self.momentum, self.clip = [weight.copy() for weight in START], momentum, clip
        self.velocity = [np.zeros_like(weight) for weight in START]
        self.rate = RATE

    def epoch(self, batches=7):
        waiting = None
        for begin in range(0, ROWS, BATCH)[:batches]:
            gradients = gradient(self.weights, X[begin : begin + BATCH], Y[begin : begin + BATCH])
            self.update(waiting)
            waiting = gradients
        self.update(waiting)

    def update(self, gradients):
        if gradients is None:
            return
        if self.clip:
            norm = np.sqrt(sum(np.sum(array**2) for array in gradients))
            gradients = [array * min(1, self.clip / norm) for array in gradients]
        self.velocity = [self.momentum * v - self.rate * g for v, g in zip(self.velocity, gradients, strict=True)]
        self.weights = [w + v for w, v in zip(self.weights, self.velocity, strict=True)]


def golden():
    cases = (
        (0.0, None, {"run_eagerly": True}),
        (0.0, None, {}),
        (0.875, 0.5, {}),
        (0.0, None, {"steps_per_execution": 3}),
    )
    for momentum, clip, way in dealt(cases, size, 5):
        reference = Late(momentum, clip)
        made = strategy()
        how = {"momentum": momentum, "global_clipnorm": clip}
        model = linear(made, optimizer=lambda how=how: keras.optimizers.SGD(RATE, **how), **way)
        report = tfdist.callbacks.StalenessReport()
        for epoch in range(EPOCHS):
            fit(model, epochs=epoch + 1, initial_epoch=epoch, callbacks=[report])
            reference.epoch()
            assert_close(model, reference.weights)
        assert_alike(model)
        assert int(model.optimizer.iterations) == 7 * EPOCHS
        assert report.counts == [{0: 1, 1: 6}] * EPOCHS, report.counts


def features():
    """Ranks end with equal weights, validation is of the newest ones, and training works."""
    optimizers = (
        lambda: keras.optimizers.AdamW(0.02, weight_decay=0.01, clipnorm=1.0),
        lambda: keras.optimizers.Adam(0.02),
        lambda: keras.optimizers.SGD(0.02, use_ema=True, ema_momentum=0.5),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 50)),
    )
    for optimizer in dealt(optimizers, 2, 4):
        model = linear(strategy(), optimizer=optimizer, metrics=["mae"])
        history = fit(model, epochs=6, validation_data=batched(X, Y, 32))
        assert_alike(model)
        assert history["loss"][-1] < history["loss"][0]
        if model.optimizer.use_ema:  # the averages are the weights from the end of `fit` on
            continue
        np.testing.assert_allclose(history["val_loss"][-1], model.evaluate(batched(X, Y, 32), verbose=0)[0])
        np.testing.assert_allclose(
            history["val_loss"][-1], np.mean((model.predict(batched(X, Y, 32), verbose=0) - Y) ** 2)
        )


def callbacks():
    """Rates and weights that callbacks set, and a stop in an epoch, count for what is late, too."""
    model, reference = linear(strategy()), Late()
    fit(model, callbacks=[Sets(stop=(2, 2))])
    for epoch, batches in enumerate((7, 7, 3)):
        reference.rate /= 2
        if epoch == 1:
            reference.weights = [weight / 2 for weight in reference.weights]
        reference.epoch(batches)
    assert int(model.optimizer.iterations) == 17
    assert_close(model, reference.weights)
    assert_alike(model)


def loops():
    made = strategy()
    with made.scope():
        gan = Gan()
        gan.build((None, 5))
        gan.compile(keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.SGD(0.01, momentum=0.9))
    gan.fit(tf.data.Dataset.from_tensor_slices(X).batch(BATCH), epochs=2, verbose=0)
    assert_alike(gan)
    model = linear(made := strategy())
    step = stepping(made, model)
    for _ in range(4):
        step(tf.constant(X[:8] / 3), tf.constant(Y[:8] / 3))
    assert int(model.optimizer.iterations) == 3
    made.settle(model)
    assert int(model.optimizer.iterations) == 4
    assert_alike(model)


def again():
    model = linear(made := strategy())
    fit(model, epochs=1)

    with pytest.raises(KeyError, match="interrupted"):
        fit(model, callbacks=[Interrupts(batch=3)])
    fit(model, epochs=1)
    assert_alike(model)
    with made.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model, epochs=1)
    assert_alike(model)
    for _ in range(3):
        model.train_on_batch(X[:8], Y[:8])
    model.evaluate(batched(X, Y, 32), verbose=0)
    assert int(model.optimizer.iterations) == 7 + 3
    assert_alike(model)


def compressed():
    made = strategy(compression=tfdist.compression.TopK(0.1))
    keras.utils.set_random_seed(1)
    with made.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(300, "tanh"), keras.layers.Dense(3)])
        model.compile(keras.optimizers.SGD(0.02), "mse")
    losses = fit(model, epochs=8)["loss"]
    assert losses[-1] < losses[0] / 2, losses
    assert_alike(model)
    if size > 1:
        assert all(stats["sent_bytes"] < stats["plain_bytes"] for stats in made.compression().values())


def restarted():
    place = os.path.join(FOLDER, f"backup-{size}")
    with pytest.raises(KeyError, match="interrupted"):
        fit(linear(strategy()), epochs=4, callbacks=[keras.callbacks.BackupAndRestore(place), Interrupts(2)])
    tfdist.barrier()
    model = linear(strategy())
    fit(model, epochs=4, callbacks=[keras.callbacks.BackupAndRestore(place)])
    reference = Late()
    for _ in range(4):
        reference.epoch()
    assert_close(model, reference.weights)
    assert_alike(model)


def refused():
    for delay in (2, -1, 0.5, "1"):
        with pytest.raises(ValueError, match="must be 0 or 1 steps; got"):
            tfdist.AllReduceStrategy(delay=delay)
    with pytest.raises(ValueError, match="needs one device in each process"):
        strategy(devices=["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="loss scaling"):
        fit(linear(strategy(), optimizer=lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())))
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        fit(linear(strategy(), optimizer=lambda: keras.optimizers.SGD(gradient_accumulation_steps=2)))
    with pytest.raises(ValueError, match="sums gradients in each step"):
        fit(linear(strategy()), callbacks=[tfdist.callbacks.GradientNoiseScale()])


def mismatched():
    tfdist.AllReduceStrategy(delay=rank)


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
