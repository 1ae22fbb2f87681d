"""A second strategy in a process; its servers are threads of this process."""

import keras
import numpy as np
import pytest

from tests.strategies.served import Served, served
from tfdist.layers import DynamicEmbedding
from tfdist.parameter_server.options.arguments import Arguments

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
KEYS = np.arange(32)[:, None] % 5


def second(first, data="own"):
    return Served(first.servers, 0, Arguments(data=data), before=first)


def trained(strategy, x, *layers):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([*(layer() for layer in layers), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(x, X[:, :1], batch_size=8, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize("data", ["own", "shared"])
def test_second_strategy_has_models_of_its_own(data):
    with served(data=data) as (strategy,):
        layers = lambda: keras.layers.Input((4,)), keras.layers.BatchNormalization
        model = trained(strategy, X, *layers)
        other = trained(second(strategy, data), X, *layers)
        assert other.optimizer.iterations == 4, "it went on from the other model"
        for weight, expected in zip(other.get_weights(), model.get_weights(), strict=True):
            np.testing.assert_allclose(weight, expected, rtol=1e-5)


def test_second_strategy_has_tables_of_its_own():
    with served() as (strategy,):
        layers = lambda: keras.layers.Input((1,), dtype="int64"), lambda: DynamicEmbedding(3), keras.layers.Flatten
        keys, rows = trained(strategy, KEYS, *layers).layers[0].export()
        own_keys, own_rows = trained(second(strategy), KEYS, *layers).layers[0].export()
        assert own_keys.tolist() == keys.tolist()
        np.testing.assert_allclose(own_rows, rows, rtol=1e-5)
