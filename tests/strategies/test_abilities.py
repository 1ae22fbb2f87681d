"""Seams require abilities: a strategy without an ability gets Keras's own behaviour."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.sweeps import sweep
from tfdist.private import tensorflow as private
from tfdist.strategies import abilities
from tfdist.strategies.data import datasets
from tfdist.strategies.keras import keras_seams

X = np.random.default_rng(0).normal(size=(23, 4))
Y = X @ np.array([[1.0], [-2.0], [0.5], [3.0]])


class Plain(tf.distribute.MirroredStrategy):
    """TensorFlow's strategy; the subclasses below have their own `extended`."""

    extended_type = None

    def __init__(self):
        super().__init__(["CPU:0"])
        if self.extended_type is not None:
            keras_seams.install()
            self._extended = self.extended_type(self, devices=["CPU:0"])


class OtherWriter(private.MirroredExtended, abilities.Ability):
    """Writes, but on another process."""

    is_writer = False


class Writer(OtherWriter):
    is_writer = True
    alone = 0

    @contextlib.contextmanager
    def local_only(self):
        self.alone += 1
        yield


def strategy_of(extended):
    return type("Strategy", (Plain,), {"extended_type": extended})()


def model(strategy, metrics=("mae",)):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        )
        made.compile(keras.optimizers.SGD(0.01, clipnorm=1.0), "mse", metrics=list(metrics))
    return made


def trained(strategy, **arguments):
    made = model(strategy)
    history = made.fit(X, Y, batch_size=5, epochs=2, verbose=0, **arguments).history
    results = made.evaluate(X, Y, batch_size=5, verbose=0)
    return [history["loss"], history["mae"], results, made.predict(X, verbose=0).tolist(), made.get_weights()]


@pytest.mark.parametrize("extended", [OtherWriter, sweep(Writer)])
def test_training_is_plain_where_nothing_is_shared_or_reduced(extended):
    """Losses, gradients, Dropout's seeds, shuffling and data are Keras's own."""
    expected, results = trained(Plain()), trained(strategy_of(extended))
    for array, other in zip(expected[:4], results[:4], strict=True):
        np.testing.assert_array_equal(array, other)
    for array, other in zip(expected[4], results[4], strict=True):
        np.testing.assert_array_equal(array, other)


@pytest.mark.parametrize("extended", [None, OtherWriter])
def test_data_is_read_by_tensorflow_where_batches_are_not_shared(extended):
    strategy = strategy_of(extended)
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    assert not isinstance(distributed, datasets.SharedDataset)
    assert [batch.numpy().tolist() for batch in distributed] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_only_the_writer_writes(tmp_path):
    for extended, writes in ((OtherWriter, False), (Writer, True), (None, True)):
        folder = tmp_path / getattr(extended, "__name__", "none")
        folder.mkdir()
        made = model(strategy_of(extended))
        made.fit(X, Y, verbose=0, callbacks=[keras.callbacks.CSVLogger(folder / "log.csv")])
        made.save(folder / "model.keras")
        made.save_weights(folder / "model.weights.h5")
        names = {"log.csv", "model.keras", "model.weights.h5"}
        assert {file.name for file in folder.iterdir()} == (names if writes else set())


def test_writer_saves_models_in_local_only(tmp_path):
    strategy = strategy_of(Writer)
    model(strategy).save(tmp_path / "model.keras")
    assert strategy.extended.alone


def test_only_the_writer_shows_progress(capfd):
    for extended, shows in ((OtherWriter, False), (Writer, True)):
        made = model(strategy_of(extended))
        capfd.readouterr()
        made.fit(X, Y)
        assert ("loss" in capfd.readouterr().out) is shows


def test_process_that_does_not_write_still_loads_weights(tmp_path):
    path = tmp_path / "model.weights.h5"
    expected = model(strategy_of(Writer))
    expected.fit(X, Y, verbose=0)
    expected.save_weights(path)
    loaded = model(strategy_of(OtherWriter))
    loaded.load_weights(path)
    for weight, other in zip(expected.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_ability_without_required_methods_raises():
    class Silent(private.MirroredExtended, abilities.DataParallel):
        pass

    with pytest.raises(TypeError, match="count"):
        strategy_of(Silent)
