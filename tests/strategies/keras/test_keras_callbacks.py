import keras
import numpy as np
import pytest

from tests.strategies.ranked import Ranked, model_of, on_ranks
from tfdist import compression as c
from tfdist.strategies.keras import keras_accumulation, keras_callbacks, keras_epochs

X, Y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)


def model_in(strategy, optimizer=keras.optimizers.SGD):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, name="head")])
        model.compile(optimizer(), "mse")
    return model


@pytest.mark.parametrize("compression", [None, c.TopK(0.5)])
def test_only_the_writer_keeps_writing_callbacks(ranks, tmp_path, compression):
    """Every rank keeps its checkpoints where there are residuals, of which each saves its own."""

    def work(strategy):
        given = [
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.ModelCheckpoint(tmp_path / "x.keras"),
            keras.callbacks.EarlyStopping(),
        ]
        return [type(callback).__name__ for callback in keras_callbacks.adapt(given, model_of(strategy))]

    writer, other = on_ranks(ranks(2), work, compression=compression)
    first, last = "GatherAtEpochEnd", "EpochSynchronization"
    assert writer == [first, "CSVLogger", "ModelCheckpoint", "EarlyStopping", last]
    assert other == [first, *(["ModelCheckpoint"] if compression else []), "EarlyStopping", last]


@pytest.mark.parametrize("given", [None, [], keras.callbacks.Callback(), [[keras.callbacks.Callback()]]])
def test_adapt_accepts_none_one_or_nested_callbacks(ranks, given):
    adapted = keras_callbacks.adapt(given, model_of(Ranked(ranks(1).groups[0])))
    assert isinstance(adapted[0], keras_accumulation.GatherAtEpochEnd)
    assert isinstance(adapted[-1], keras_epochs.EpochSynchronization)
    assert [type(callback) for callback in adapted[1:-1]] == [keras.callbacks.Callback] * bool(given)


def test_a_callback_list_stays_the_users(ranks):
    strategy = Ranked(ranks(1).groups[0])
    model = model_in(strategy)
    given = keras.callbacks.CallbackList([keras.callbacks.EarlyStopping()], model=model)
    assert keras_callbacks.adapt(given, model_of(strategy)) is given
    assert isinstance(given.callbacks[-1], keras_epochs.EpochSynchronization)
    assert given.callbacks[-1].model is model


def test_writing_callbacks_run_in_local_only(ranks, tmp_path):
    """Each of its hooks, and once only, however often it is used."""
    strategy = Ranked(ranks(1).groups[0])
    extended, seen = strategy.extended, []

    class Logger(keras.callbacks.CSVLogger):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, extended._local_only))

        def on_train_end(self, logs=None):
            pass

    callback = Logger(tmp_path / "log.csv")
    for _ in range(2):
        keras_callbacks.adapt([callback], model_of(strategy))
    callback.on_epoch_end(3)
    assert seen == [(3, 1)]
    assert not extended.is_local_only
    other = Ranked(ranks(1).groups[0])
    keras_callbacks.adapt([callback], model_of(other))
    extended = other.extended
    callback.on_epoch_end(4)
    assert seen[1:] == [(4, 1)], "under another strategy, too"
