"""Seams for weights in rows; `tests/multiprocess/test_weight_parts.py` trains whole models."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import RankedShards
from tfdist.strategies.all_reduce.weight_parts_extended import WeightPartsExtended
from tfdist.strategies.divided import weight_parts


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch):
    monkeypatch.setattr("tfdist.sharding.SPLIT_BYTES", 0)


def test_layers_have_whole_weights_while_they_are_called(ranks):
    """Also a layer whose cell is called in a loop, and one that is built while a model is traced."""

    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        with strategy.scope():
            keras.utils.set_random_seed(group.rank)  # all get the chief's values
            model = keras.Sequential([keras.layers.LSTM(3), keras.layers.Dense(2)])
            model.build((None, 4, 2))
        assert all(weight_parts.of(weight) for weight in model.weights)
        return model.get_weights(), model(x).numpy()

    x = np.random.default_rng(0).normal(size=(3, 4, 2)).astype("float32")
    (weights, here), (others, there) = ranks(2)(work)
    plain = keras.Sequential([keras.layers.LSTM(3), keras.layers.Dense(2)])
    plain.build((None, 4, 2))
    plain.set_weights(weights)
    np.testing.assert_allclose(here, plain(x), rtol=1e-5)
    np.testing.assert_array_equal(here, there)
    for weight, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(weight, other)


def test_shapes_are_computed_without_gathering(ranks):
    """A process may compute them alone."""

    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        with strategy.scope():
            layer = keras.layers.Dense(3)
            layer.build((None, 4))
        return layer(keras.Input((4,))).shape if group.rank == 0 else None

    assert ranks(2)(work) == [(None, 3), None]


@pytest.mark.parametrize(("gather", "gathers"), [("layer", 4), ("model", 1)])
def test_a_step_gathers_each_layer_twice_or_the_model_once(ranks, gather, gathers):
    """Gradients are summed layer by layer, the last one first."""

    def work(group):
        strategy = RankedShards(group, functools.partial(WeightPartsExtended, gather=gather))
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(2)])
        weights, gathered, summed = strategy.extended.weights, [], []
        whole, sums = weights._gather, weights._sums
        weights._gather = lambda given: gathered.append(len(given)) or whole(given)
        weights._sums = lambda gradients, given: summed.append(given[0].spec.shape) or sums(gradients, given)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.ones([1, 4])))
            return tape.gradient(loss, model.trainable_weights)

        step()
        return gathered, summed

    for gathered, summed in ranks(2)(work):
        assert gathered == [4 if gather == "model" else 2] * gathers
        assert summed == [(3, 2), (4, 3)]


class OfMyOwn(keras.callbacks.EarlyStopping):
    """May look at the weights that it keeps."""


@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, OfMyOwn])
def test_early_stopping_keeps_parts_and_sends_nothing(ranks, kind):
    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.set_weights([np.arange(12.0).reshape(4, 3), np.arange(3.0)])
        stopping = kind("loss", patience=1, restore_best_weights=True)
        stopping.set_model(model)
        stopping.on_train_begin()
        before = group.engine.statistics.collectives
        stopping.on_epoch_end(0, {"loss": 1.0})
        model.set_weights([np.zeros((4, 3)), np.zeros(3)])
        stopping.on_epoch_end(1, {"loss": 2.0})
        stopping.on_train_end()
        sends = group.engine.statistics.collectives > before
        return sends, [value.shape for value in stopping.best_weights], model.get_weights()

    for rank, (sends, shapes, restored) in enumerate(ranks(2)(work)):
        is_keras = kind is keras.callbacks.EarlyStopping
        assert sends is not is_keras
        assert shapes == ([(2, 3), (1 + rank,)] if is_keras else [(4, 3), (3,)])
        for value, expected in zip(restored, (np.arange(12.0).reshape(4, 3), np.arange(3.0)), strict=True):
            np.testing.assert_array_equal(value, expected)


def test_export_is_refused(ranks, tmp_path):
    def work(group):
        strategy = RankedShards(group, WeightPartsExtended)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        with pytest.raises(ValueError, match="load it outside of the scope, and export that"):
            model.export(tmp_path / "exported")

    ranks(2)(work)
