"""What programs about training in rounds have alike."""

import os

import keras
import numpy as np
import tensorflow as tf
from comparing import assert_close

import tfdist


def dealt(cases, place, among):
    """Each ``among``-th case from a place on; all in sweeps. Other numbers of processes or programs take the others."""
    return list(cases) if os.environ.get("TEST_SWEEP") else list(cases)[place % among :: among]


def in_sweeps(*cases):
    """Cases that only sweeps have, as others show the same."""
    return cases if os.environ.get("TEST_SWEEP") else ()


def sums_are_those_of_the_whole_batch(linear, strategy, place):
    """Losses that are not means have the steps and logs of the whole batch, if all processes average after each step.

    Args:
        linear: makes a model of a strategy, which begins with the same weights each time.
        strategy: strategy that averages over all processes after each step; plain Keras is eager, as it would trace
            longer than it trains.
        place: place of the first loss to test; see `dealt`.
    """
    x = np.random.default_rng(1).normal(size=(48, 5))  # in batches that divide among 1, 2 and 3 processes
    y = x[:, :3] * 2
    losses = (
        keras.losses.MeanSquaredError(reduction="sum"),
        lambda y_true, y_pred: tfdist.scale_summed_loss(tf.reduce_sum(tf.square(y_true - y_pred))),
        keras.losses.MeanSquaredError(reduction="none"),
    )
    for loss in dealt(losses, place, 3):
        results = []
        for current_strategy in (tf.distribute.get_strategy(), strategy):
            with current_strategy.scope():
                model = linear(current_strategy)
                model.compile(keras.optimizers.SGD(0.002), loss, run_eagerly=current_strategy is not strategy)
            history = model.fit(x, y, batch_size=12, shuffle=False, verbose=0).history
            evaluated = model.evaluate(batched(x, y, 12), verbose=0)
            results.append((model, history["loss"], evaluated))
        (plain, expected, wanted), (model, loss_history, got) = results
        assert_close(model, plain.get_weights())
        np.testing.assert_allclose(loss_history, expected, rtol=1e-6)
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def batched(x, y, size):
    """Returns samples as a dataset, in their order: of arrays Keras would trace functions in each call of `fit`."""
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


class Sets(keras.callbacks.Callback):
    """Halves the rate at each epoch's beginning, and all weights at that of the second one; may stop in an epoch.

    Args:
        stop: an epoch and the batch after which training ends.
    """

    def __init__(self, stop=None):
        super().__init__()
        self.stop, self.epoch = stop, 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate) / 2
        if epoch == 1:
            self.model.set_weights([weight / 2 for weight in self.model.get_weights()])

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.stop:
            self.model.stop_training = True


class Stops(keras.callbacks.Callback):
    """Counts batches, and stops training in the middle of an epoch.

    Args:
        at: after how many batches; None for never.
    """

    def __init__(self, at):
        super().__init__()
        self.at, self.seen = at, 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1
        if self.seen == self.at:
            self.model.stop_training = True


class StopsBefore(keras.callbacks.Callback):
    """Stops training before the first step, after which an epoch then ends."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.stop_training = True


def callbacks_set_rates_and_weights(linear, strategy):
    """Callbacks act as on one process, if all processes average after each step.

    Args:
        linear: makes a model of a strategy, which begins with the same weights each time.
        strategy: strategy that averages over all processes after each step.
    """
    x = np.random.default_rng(1).normal(size=(48, 5))
    results = []
    for current_strategy in (tf.distribute.get_strategy(), strategy):
        model = linear(current_strategy, run_eagerly=current_strategy is not strategy)
        history = model.fit(batched(x, x[:, :3], 12), epochs=2, verbose=0, callbacks=[Sets()]).history
        results.append((model, history["loss"]))
    (plain, expected), (model, losses) = results
    assert_close(model, plain.get_weights())
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def gradient(weights, x, y):
    """Returns the gradient of the mean squared error of x W + b."""
    error = 2 * (x @ weights[0] + weights[1] - y) / max(y.size, 1)
    return [x.T @ error, error.sum(axis=0)]
