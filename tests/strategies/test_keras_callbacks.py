import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, on_ranks
from tfdist import compression as c
from tfdist.errors import MismatchError
from tfdist.strategies import keras_callbacks
from tfdist.strategies import tensorflow_private as private

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def model_in(strategy, optimizer=keras.optimizers.SGD):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="head")])
        model.compile(optimizer(), "mse")
    return model


def fit(strategy, *callbacks, epochs=3, optimizer=keras.optimizers.SGD):
    """The model, and the epochs that it was trained."""
    model = model_in(strategy, optimizer)
    history = model.fit(X, Y, batch_size=2, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model, len(history.epoch)


@pytest.mark.parametrize("compression", [None, c.TopK(0.5)])
def test_who_writes_keeps_what_writes(ranks, tmp_path, compression):
    """Every rank keeps its checkpoints where there are residuals, of which each saves its own."""

    def work(strategy):
        given = [
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.ModelCheckpoint(tmp_path / "x.keras"),
            keras.callbacks.EarlyStopping(),
        ]
        return [type(callback).__name__ for callback in keras_callbacks.adapt(given, strategy.extended)]

    writer, other = on_ranks(ranks(2), work, compression=compression)
    assert writer == ["CSVLogger", "ModelCheckpoint", "EarlyStopping", "Together"]
    assert other == [*(["ModelCheckpoint"] if compression else []), "EarlyStopping", "Together"]


@pytest.mark.parametrize("given", [None, [], keras.callbacks.Callback(), [[keras.callbacks.Callback()]]])
def test_callbacks_as_keras_takes_them(ranks, given):
    extended = Ranked(ranks(1).groups[0]).extended
    found = keras_callbacks.adapt(given, extended)
    assert isinstance(found[-1], keras_callbacks.Together)
    assert [type(callback) for callback in found[:-1]] == [keras.callbacks.Callback] * bool(given)


def test_a_callback_list_stays_the_users(ranks):
    strategy = Ranked(ranks(1).groups[0])
    model = model_in(strategy)
    given = keras.callbacks.CallbackList([keras.callbacks.EarlyStopping()], model=model)
    assert keras_callbacks.adapt(given, strategy.extended) is given
    assert isinstance(given.callbacks[-1], keras_callbacks.Together)
    assert given.callbacks[-1].model is model


def test_what_the_writers_callback_reads_is_its_own(ranks, tmp_path):
    """Each of its hooks, and once only, however often it is used."""
    extended = Ranked(ranks(1).groups[0]).extended
    seen = []

    class Logger(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, extended._local_only))

        def on_train_end(self, logs=None):
            pass

    callback = Logger(tmp_path / "log.csv")
    for _ in range(2):
        keras_callbacks.adapt([callback], extended)
    callback.on_epoch_end(3)
    assert seen == [(3, 1)]
    assert not extended.is_local_only


@pytest.mark.parametrize("wishes", ["on_train_batch_end", "on_epoch_end"])
def test_all_stop_where_one_wishes_to(ranks, wishes):
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


def test_what_is_not_to_be_checked_may_differ(ranks):
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
        model.fit(rows, Y, batch_size=2, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()[0].tobytes(), model.optimizer._accumulated_gradients[0].numpy().tobytes()

    first, second = on_ranks(ranks(2), work)
    assert first[0] == second[0]
    assert first[1] != second[1], "this test supposes that they differ"
