"""Seams require abilities: a strategy without an ability gets Keras's own behaviour."""

import contextlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import model_of
from tfdist.private import tensorflow as private
from tfdist.strategies import abilities, at_work
from tfdist.strategies.data import datasets
from tfdist.strategies.keras import keras_callbacks, keras_epochs, keras_seams
from tfdist.strategies.stopping import Stopping

X = np.random.default_rng(0).normal(size=(23, 4))
Y = X @ np.array([[1.0], [-2.0], [0.5], [3.0]])
ALL = (
    abilities.SharesBatches,
    abilities.ReducesGradients,
    abilities.MergesMetrics,
    abilities.AveragesState,
    abilities.WritesOnce,
    abilities.LoadsForAll,
    abilities.EndsEpochsTogether,
)


class Plain(tf.distribute.MirroredStrategy):
    """TensorFlow's strategy; the subclasses below have their own `extended`."""

    extended_type = None

    def __init__(self):
        super().__init__(["CPU:0"])
        if self.extended_type is not None:
            keras_seams.install()
            self._extended = self.extended_type(self, devices=["CPU:0"])


class OtherWriter(private.MirroredExtended, abilities.WritesOnce):
    """Writes, but on another process."""

    is_writer = False


class Writer(OtherWriter):
    is_writer = True
    alone = 0

    @contextlib.contextmanager
    def local_only(self):
        self.alone += 1
        yield


class Twice:
    """Simulates two processes with equal values."""

    def __init__(self):
        self.names = []

    def all_reduce(self, tensors, names=None, combine=np.add, **_):
        self.names += ["an agreement"] if names is None else names
        return [2 * tensor if combine is np.add else tensor for tensor in tensors]


class Merger(private.MirroredExtended, abilities.MergesMetrics):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.bridge = Twice()


class Ender(Merger, abilities.EndsEpochsTogether):
    checks_weights = False
    exchange = None
    stopping = Stopping()


class Samples(keras.metrics.Sum):
    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(tf.ones_like(y_true))


def of(extended):
    return type("Strategy", (Plain,), {"extended_type": extended})()


def model(strategy, metrics=("mae",)):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = keras.Sequential(
            [keras.layers.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        )
        made.compile(keras.optimizers.SGD(0.01, clipnorm=1.0), "mse", metrics=list(metrics))
    return made


class Seen(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.params_of_fit = dict(self.params)


def trained(strategy, **arguments):
    made = model(strategy)
    history = made.fit(X, Y, batch_size=5, epochs=2, verbose=0, **arguments).history
    results = made.evaluate(X, Y, batch_size=5, verbose=0)
    return [history["loss"], history["mae"], results, made.predict(X, verbose=0).tolist(), made.get_weights()]


@pytest.mark.parametrize("extended", [OtherWriter, Writer, Ender])
def test_training_is_plain_where_nothing_is_shared_or_reduced(extended):
    """Losses, gradients, Dropout's seeds, shuffling and data are Keras's own."""
    expected, found = trained(Plain()), trained(of(extended))
    for one, other in zip(expected[:4], found[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    for one, other in zip(expected[4], found[4], strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("extended", [None, OtherWriter, Merger])
def test_data_is_read_by_tensorflow_where_batches_are_not_shared(extended):
    strategy = of(extended)
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(8).batch(4))
    assert not isinstance(distributed, datasets.SharedDataset)
    assert [batch.numpy().tolist() for batch in distributed] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_only_the_writer_writes(tmp_path):
    for extended, writes in ((OtherWriter, False), (Writer, True), (Merger, True), (None, True)):
        folder = tmp_path / getattr(extended, "__name__", "none")
        folder.mkdir()
        made = model(of(extended))
        made.fit(X, Y, verbose=0, callbacks=[keras.callbacks.CSVLogger(folder / "log.csv")])
        made.save(folder / "model.keras")
        made.save_weights(folder / "model.weights.h5")
        names = {"log.csv", "model.keras", "model.weights.h5"}
        assert {file.name for file in folder.iterdir()} == (names if writes else set())


def test_the_writer_works_alone(tmp_path):
    strategy = of(Writer)
    model(strategy).save(tmp_path / "model.keras")
    assert strategy.extended.alone


def test_only_the_writer_shows_progress(capfd):
    for extended, shows in ((OtherWriter, False), (Writer, True), (Merger, True)):
        made = model(of(extended))
        capfd.readouterr()
        made.fit(X, Y)
        assert ("loss" in capfd.readouterr().out) is shows


def test_weights_are_loaded_by_each_where_nobody_loads_for_all(tmp_path):
    path = tmp_path / "model.weights.h5"
    expected = model(of(Writer))
    expected.fit(X, Y, verbose=0)
    expected.save_weights(path)
    found = model(of(OtherWriter))
    found.load_weights(path)
    for one, other in zip(expected.get_weights(), found.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_only_metrics_are_merged():
    """Only their state passes the bridge: no gradients, counts or agreements."""
    strategy = of(Merger)
    made = model(strategy, [keras.metrics.MeanAbsoluteError(name="mae"), Samples(name="samples")])
    plain = model(Plain(), [keras.metrics.MeanAbsoluteError(name="mae"), Samples(name="samples")])
    found, expected = (one.evaluate(X, Y, verbose=0, return_dict=True) for one in (made, plain))
    assert found["mae"] == pytest.approx(expected["mae"])
    assert (found["samples"], expected["samples"]) == (2 * len(X), len(X))
    made.fit(X, Y, verbose=0)
    assert set(strategy.extended.bridge.names) == {variable.path for variable in made.metrics_variables}


@pytest.mark.parametrize(("extended", "agrees"), [(Merger, False), (Ender, True), (Writer, False)])
def test_callbacks_are_those_of_the_abilities(extended, agrees):
    strategy = of(extended)
    adapted = keras_callbacks.adapt([Seen()], model_of(strategy))
    assert [type(callback) for callback in adapted] == [Seen] + [keras_epochs.Together] * agrees


def test_an_ability_is_asked_for_by_name():
    strategy = of(Ender)
    found = [ability for ability in ALL if at_work.of_strategy(strategy, ability) is not None]
    assert found == [abilities.MergesMetrics, abilities.EndsEpochsTogether]
    with strategy.scope():
        assert at_work.current(abilities.MergesMetrics) is strategy.extended
        assert at_work.current(abilities.WritesOnce) is None
        assert at_work.of_model(model(strategy), abilities.Ability) is strategy.extended
    for other in (None, tf.distribute.get_strategy(), Plain()):
        assert at_work.of_strategy(other, abilities.Ability) is None


def test_an_ability_needs_all_that_it_is_asked_for():
    class Silent(private.MirroredExtended, abilities.WritesOnce):
        pass

    with pytest.raises(TypeError, match="is_writer"):
        of(Silent)
