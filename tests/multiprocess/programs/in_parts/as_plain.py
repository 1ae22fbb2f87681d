"""What programs have alike whose models keep weights in parts, and train as plain Keras, which is eager.

Functions take what makes a strategy (``strategy``) and a model that takes `X` (``make``), in the scope of one or not.
"""

import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from comparing import assert_close
from interrupting import Interrupts

import tfdist
from tfdist.strategies.divided import weight_parts

FOLDER = sys.argv[1]
ROWS, BATCH = 21, 8  # a last batch of 5 rows, of which one process of four gets 2 and the others 1

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
generator = np.random.default_rng(0)
TOKENS, IMAGES, X, Y = (
    generator.integers(0, 12, (ROWS, 6)),
    generator.normal(size=(ROWS, 6, 6, 3)),
    generator.normal(size=(ROWS, 7)),
    generator.normal(size=(ROWS, 2)),
)


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def averages():
    return keras.optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    )


def scaled():
    """The norm of each whole gradient is clipped, too."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), 256.0, 3)


def accumulated():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1)


class Penalized(keras.Model):
    """Penalizes the gradient by its inputs."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            penalty = tf.reduce_mean(tf.reduce_sum(inner.gradient(outputs, x) ** 2, 1))
            loss = self.compute_loss(x=x, y=y, y_pred=outputs) + penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def compiled(make, optimizer=momentum, made=None, loss="mse", **how):
    """A model in the scope of a strategy that was made, or of plain Keras."""
    keras.utils.set_random_seed(1)
    with (made or tf.distribute.get_strategy()).scope():
        model = make()
        model.compile(optimizer(), loss, **{"run_eagerly": made is None, **how})
    return model


def fit(model, x=X, epochs=2, **how):
    """The losses of epochs on a dataset: of arrays Keras traces functions in each call."""
    data = tf.data.Dataset.from_tensor_slices((x, Y)).batch(BATCH)
    return model.fit(data, epochs=epochs, verbose=0, **how).history["loss"]


def assert_as_plain(make, x, made, optimizer=momentum, epochs=2, loss="mse", **how):
    """Weights, losses and outputs are those of plain Keras, and some weights are in parts."""
    model = compiled(make, optimizer, made, loss, **how)
    losses, some = fit(model, x, epochs), tf.data.Dataset.from_tensor_slices(x[:5]).batch(5)
    outputs, weights = model.predict(some, verbose=0), model.get_weights()
    kept = [weight_parts.of(weight) is not None for weight in model.weights]
    assert tfdist.all_gather(tf.constant([any(kept)])).numpy().any()  # a stage of a pipeline may have none
    if rank == 0:
        plain = compiled(make, optimizer, loss=loss)
        np.testing.assert_allclose(losses, fit(plain, x, epochs), rtol=1e-6)
        assert_close(weights, plain.get_weights())
        np.testing.assert_allclose(outputs, plain.predict(some, verbose=0), rtol=1e-6)
    tfdist.barrier()
    return model


def assert_as_plain_in_all_ways(strategy, make):
    made = strategy()
    for how in ({"steps_per_execution": 2}, {"jit_compile": True}, {"run_eagerly": True}):
        assert_as_plain(make, X, made, **how)


def assert_as_plain_in_loops(strategy, make, forward=lambda model: model):
    """Steps of one's own, on shares of one's own.

    Args:
        strategy: makes a strategy.
        make: makes a model.
        forward: returns the function that a step calls in place of the model.
    """
    made = strategy()
    model, plain = compiled(make, made=made), compiled(make)
    share, called = slice(rank, BATCH, size), forward(model)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((called(x, training=True) - y) ** 2) / y.shape[1] / BATCH
            loss += sum(model.losses) / size
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for run in (made.run, tf.function(made.run)):
        run(step, (tf.constant(X[share]), tf.constant(Y[share])))
    for _ in range(2):
        plain.train_on_batch(X[:BATCH], Y[:BATCH])
    assert_close(model, plain.get_weights())


def assert_files_as_plain(strategy, make):
    """Files are plain Keras's, and are read back; training goes on, and stops early. One process trains plain Keras."""
    path = os.path.join(FOLDER, f"model-{size}.keras")
    path_of_weights = path.replace(".keras", ".weights.h5")
    made = strategy()
    model = compiled(make, made=made)
    fit(model)
    model.save(path)
    model.save_weights(path_of_weights)
    tfdist.barrier()
    with made.scope():
        loaded, fresh = keras.models.load_model(path), compiled(make, made=made)
        fresh.run_eagerly = True
        fresh.optimizer.build(fresh.trainable_variables)
    fresh.load_weights(path_of_weights)
    for each in (model, loaded, fresh):
        fit(each, epochs=1)
    weights = model.get_weights()
    for each in (loaded, fresh):
        assert_close(each, weights)
    loaded.load_weights(path_of_weights)  # and the optimizer's slots, which have changed since
    fit(loaded, epochs=1)
    assert_close(loaded, weights)
    stopped = weights_of_the_best_epoch(model)
    if rank == 0:
        alone, plain = keras.models.load_model(path), compiled(make)
        alone.run_eagerly = True
        plain.optimizer.build(plain.trainable_variables)
        plain.load_weights(path_of_weights)
        for each in (alone, plain):
            fit(each, epochs=1)
            assert_close(each, weights)
        assert_close(stopped, weights_of_the_best_epoch(plain))
    tfdist.barrier()


def weights_of_the_best_epoch(model):
    """`EarlyStopping` keeps this process's parts of weights, and restores those of the first epoch."""
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
    fit(model, callbacks=[stopping])
    assert (stopping.best_epoch, stopping.stopped_epoch) == (0, 1), model
    parts = [kept.part if (kept := weight_parts.of(weight)) else weight for weight in model.weights]
    assert [value.shape for value in stopping.best_weights] == [tuple(part.shape) for part in parts]
    return model.get_weights()


def assert_restarts_as_plain(strategy, make):
    def given():
        path = os.path.join(FOLDER, "best.keras")
        return [
            keras.callbacks.BackupAndRestore(os.path.join(FOLDER, "backup")),
            keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True),
            keras.callbacks.TensorBoard(os.path.join(FOLDER, "board"), histogram_freq=1),
            keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True),
        ]

    with pytest.raises(KeyError, match="interrupted"):
        fit(compiled(make, made=strategy()), epochs=3, callbacks=[*given(), Interrupts(2)])
    tfdist.barrier()
    model = compiled(make, made=strategy())
    fit(model, epochs=3, callbacks=given())
    weights = model.get_weights()
    if rank == 0:
        plain = compiled(make)
        fit(plain, epochs=3)
        assert_close(weights, plain.get_weights())
    tfdist.barrier()


def call_alone(strategy, make, call):
    """The chief alone calls something of a model."""
    model = compiled(make, made=strategy())
    if rank == 0:
        call(model)
    tfdist.barrier()


def train_endlessly(strategy, make):
    """Trains until it is killed."""
    model = compiled(make, made=strategy())
    fit(model, epochs=1)
    print("READY", flush=True)
    fit(model, epochs=10**6)
