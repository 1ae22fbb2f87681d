"""What a divided optimizer takes, told without training."""

import keras
import pytest

from tests.strategies.ranked import RankedShards
from tfdist.strategies.divided.footprint import Footprint, footprint_of, planned


def model_with(optimizer, units=(3, 2)):
    model = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, units)])
    model.compile(optimizer, "mse")
    return model


def test_it_is_what_a_strategy_allocates(ranks):
    def work(group):
        strategy = RankedShards(group)
        with strategy.scope():
            model = model_with(keras.optimizers.Adam(use_ema=True))
            model.optimizer.build(model.trainable_variables)
        return footprint_of(strategy.extended.ready(model.optimizer))

    everyone = ranks(2)(work)
    model = model_with(keras.optimizers.Adam(use_ema=True))
    assert everyone == [planned(model, 2)] * 2
    assert everyone[0] == Footprint(weights=92, slots=(144, 132), sent=96)
    assert not model.optimizer.built, "only a copy is"
    assert "take 0.0 MB in all, and at most 0.0 MB in each of 2 processes" in str(everyone[0])


def test_large_weights_are_counted_by_rows():
    whole = 4 * (4 * 30_000 + 30_000)
    model = model_with(keras.optimizers.SGD(0.1, momentum=0.9), units=(30_000,))
    assert planned(model, 2).slots == (4 * 2 * 30_000 + 4 * 30_000, 4 * 2 * 30_000)
    assert planned(model_with(keras.optimizers.SGD(0.1), units=(30_000,)), 2) == Footprint(
        whole, (0, 0), 2 * (whole - 4 * 2 * 30_000)
    )


def test_contained_optimizers_are_added_up():
    scaled = model_with(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    assert planned(scaled, 2) == planned(model_with(keras.optimizers.Adam()), 2)


def test_what_cannot_be_divided_is_an_error():
    with pytest.raises(ValueError, match="adam cannot be divided: 5 processes are too many"):
        planned(model_with(keras.optimizers.Adam(name="adam")), 5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="expected a model that is built, and compiled"):
        planned(model, 2)
