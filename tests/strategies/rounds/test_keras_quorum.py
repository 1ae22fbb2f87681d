"""What `fit` does as others have begun before, or end; with an `extended` that says so."""

import keras
import pytest
import tensorflow as tf

from tfdist.strategies.rounds import keras_quorum


class Says:
    """A stand-in for the other processes.

    Args:
        epoch: epoch that the other processes are in.
        ends_epoch_at: epochs and batches after which they have ended an epoch.
        over_at: an epoch and a batch after which they have ended `fit`.
    """

    def __init__(self, epoch=0, ends_epoch_at=(), over_at=None):
        self.epoch, self.ends_epoch_at, self.over_at = epoch, ends_epoch_at, over_at
        self.now, self.begun, self.ended = None, [], 0

    def begin_fit(self, model):
        return self.epoch

    def begin_epoch(self, model, epoch):
        self.begun.append(epoch)

    def epoch_has_ended(self, model):
        return self.now in self.ends_epoch_at

    def fit_is_over(self, model):
        return self.now == self.over_at

    def end_fit(self, model):
        self.ended += 1


class Counts(keras.callbacks.Callback):
    def __init__(self, says, stop_at=None):
        super().__init__()
        self.says, self.stop_at, self.batches = says, stop_at, {}

    def on_train_batch_begin(self, batch, logs=None):
        epoch = self.says.begun[-1]
        self.batches[epoch] = batch + 1
        self.says.now = (epoch, batch)

    def on_epoch_end(self, epoch, logs=None):
        if epoch == self.stop_at:
            self.model.stop_training = True


def fitted(says, initial_epoch=0, **counting):
    counts = Counts(says, **counting)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model._initial_epoch = initial_epoch or None  # as a backup says it
    callbacks = [keras_quorum.Pace(says), counts, keras_quorum.Beginning(says)]
    ones = tf.ones((1, 1))
    model.fit(
        tf.data.Dataset.from_tensors((ones, ones)).repeat(5), epochs=4, shuffle=False, verbose=0, callbacks=callbacks
    )
    assert says.ended == 1
    assert model._initial_epoch is None
    return counts.batches


@pytest.mark.parametrize(
    ("says", "initial_epoch", "expected"),
    [
        (Says(), 0, {0: 5, 1: 5, 2: 5, 3: 5}),
        (Says(epoch=2), 0, {2: 5, 3: 5}),
        (Says(epoch=2), 3, {3: 5}),
        (Says(epoch=-1), 0, {}),
        (Says(ends_epoch_at=[(1, 2), (2, 0)]), 0, {0: 5, 1: 3, 2: 1, 3: 5}),
        (Says(over_at=(1, 2)), 0, {0: 5, 1: 3}),
        (Says(ends_epoch_at=[(1, 4)]), 0, {0: 5, 1: 5, 2: 5, 3: 5}),
    ],
)
def test_fit_follows_epochs_of_other_processes(says, initial_epoch, expected):
    assert fitted(says, initial_epoch) == expected


def test_callbacks_of_the_user_still_stop_training():
    assert fitted(Says(ends_epoch_at=[(1, 2)]), stop_at=1) == {0: 5, 1: 3}
