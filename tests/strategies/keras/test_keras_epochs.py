"""All ranks stop after the same epoch, with equal weights."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import on_ranks
from tfdist.errors import MismatchError
from tfdist.private import tensorflow as private

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def model_in(strategy, optimizer=keras.optimizers.SGD):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="head")])
        model.compile(optimizer(), "mse")
    return model


def batches(rows):
    """A dataset of batches: of arrays, Keras would trace functions that make them, anew in each call."""
    return tf.data.Dataset.from_tensor_slices((rows, Y)).batch(2)


def fit(strategy, *callbacks, epochs=3, optimizer=keras.optimizers.SGD):
    """The model, and the epochs that it was trained."""
    model = model_in(strategy, optimizer)
    history = model.fit(batches(X), epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, len(history.epoch)


@pytest.mark.parametrize("wishes", ["on_train_batch_end", "on_epoch_end"])
def test_stop_request_of_one_rank_stops_all(ranks, wishes):
    def work(strategy):
        batches = []

        class Stops(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                batches.append(batch)
                self.wish("on_train_batch_end", batch)

            def on_epoch_end(self, epoch, logs=None):
                self.wish("on_epoch_end", epoch)

            def wish(self, where, number):
                if strategy.rank == 1 and where == wishes and number == 1:
                    self.model.stop_training = True

        model, epochs = fit(strategy, Stops())
        return epochs, len(batches), model.stop_training

    epochs, batches = (1, 2) if wishes == "on_train_batch_end" else (2, 8)
    assert on_ranks(ranks(2), work) == [(epochs, batches, True)] * 2


class Changes(keras.callbacks.Callback):
    """Changes a variable of the model's or the optimizer's on rank 1, in the second epoch."""

    def __init__(self, rank, choose):
        super().__init__()
        self.rank, self.choose = rank, choose

    def on_epoch_end(self, epoch, logs=None):
        if self.rank and epoch == 1:
            variable = self.choose(self.model)
            for copy in private.copies(variable.value):
                copy.assign(copy + tf.cast(1, copy.dtype))


CHOICES = {
    "head/bias": lambda model: model.layers[0].bias,
    "momentum": lambda model: model.optimizer.momentums[0],
}


@pytest.mark.parametrize("name", CHOICES)
def test_weights_and_optimizers_that_differ_are_an_error(ranks, name):
    def work(strategy):
        fit(strategy, Changes(strategy.rank, CHOICES[name]), optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9))

    words = rf"after epoch 2 the ranks' weights are not equal: .*{name}.* differs between rank 0 and rank\(s\) \[1\]"
    with pytest.raises(MismatchError, match=words):
        on_ranks(ranks(2), work)


def test_unequal_weights_are_allowed_without_checks(ranks):
    for model, epochs in on_ranks(
        ranks(2), lambda strategy: fit(strategy, Changes(strategy.rank, CHOICES["head/bias"])), checks_weights=False
    ):
        assert epochs == 3
        assert model.built


def test_gradients_that_are_accumulated_are_each_ranks_own(ranks):
    """Between two steps of the optimizer they differ: 4 batches an epoch, and a step after every third."""
    rows = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)

    def work(strategy):
        model = model_in(strategy, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
        model.fit(batches(rows), epochs=2, shuffle=False, verbose=0)
        return model.get_weights()[0].tobytes(), model.optimizer._accumulated_gradients[0].numpy().tobytes()

    first, second = on_ranks(ranks(2), work)
    assert first[0] == second[0]
    assert first[1] != second[1], "this test supposes that they differ"


def test_stop_training_set_by_schedule_stops_all_ranks(ranks):
    """A handler of signals, say: nobody waits for a rank that stops alone."""

    def work(strategy):
        model = model_in(strategy)

        def schedule(epoch, rate):
            model.stop_training = strategy.rank == 1 and epoch == 1
            return rate

        scheduler = keras.callbacks.LearningRateScheduler(schedule)
        history = model.fit(batches(X), epochs=4, shuffle=False, verbose=0, callbacks=[scheduler])
        return len(history.epoch), int(model.optimizer.iterations)

    assert on_ranks(ranks(2), work) == [(2, 8)] * 2
