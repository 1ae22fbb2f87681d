"""What a divided optimizer takes, told without training."""

import keras
import pytest

from tests.strategies.ranked import RankedShards
from tfdist import sharding
from tfdist.strategies.all_reduce.sharded_extended import ShardedExtended
from tfdist.strategies.all_reduce.weight_parts_extended import WeightPartsExtended
from tfdist.strategies.divided.footprint import Footprint, footprint_of, planned


def model_with(optimizer, units=(3, 2)):
    model = keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, units)])
    model.compile(optimizer, "mse")
    return model


@pytest.mark.parametrize("with_weights", [False, True])
def test_it_is_what_a_strategy_allocates(ranks, with_weights, monkeypatch):
    if with_weights:
        monkeypatch.setattr(sharding, "SPLIT_BYTES", 20)

    def work(group):
        strategy = RankedShards(group, WeightPartsExtended if with_weights else ShardedExtended)
        with strategy.scope():
            model = model_with(keras.optimizers.Adam(use_ema=True))
            model.optimizer.build(model.trainable_variables)
        return footprint_of(strategy.extended.ready(model.optimizer))

    everyone = ranks(2)(work)
    model = model_with(keras.optimizers.Adam(use_ema=True))
    assert everyone == [planned(model, 2, with_weights)] * 2
    expected = {False: Footprint(92, (144, 132), 96), True: Footprint(60, (132, 144), 144, 72)}
    assert everyone[0] == expected[with_weights]
    at_once = planned(model, 2, with_weights, at_once=True)
    assert at_once == (Footprint(60, (132, 144), 104, 72, True) if with_weights else everyone[0])
    assert ("72 bytes of weights are whole from the forward to the backward pass" in str(at_once)) is with_weights
    assert not model.optimizer.built, "only a copy is"
    assert "take 276 bytes in all, and at most 144 bytes in each of 2 processes" in str(everyone[0])


def test_large_weights_are_counted_by_rows():
    whole = 4 * (4 * 30_000 + 30_000)
    model = model_with(keras.optimizers.SGD(0.1, momentum=0.9), units=(30_000,))
    assert planned(model, 2).slots == (4 * 2 * 30_000 + 4 * 30_000, 4 * 2 * 30_000)
    assert planned(model_with(keras.optimizers.SGD(0.1), units=(30_000,)), 2) == Footprint(
        whole, (0, 0), 2 * (whole - 4 * 2 * 30_000)
    )


def test_weights_in_rows_need_an_optimizer_that_takes_them():
    with pytest.raises(ValueError, match="the optimizer lamb may look at whole weights, of which processes have rows"):
        planned(model_with(keras.optimizers.Lamb(name="lamb"), units=(30_000,)), 2, with_weights=True)
    constrained = keras.Sequential([keras.Input((4,)), keras.layers.Dense(30_000, kernel_constraint="non_neg")])
    constrained.compile("sgd", "mse")
    assert not planned(constrained, 2, with_weights=True).in_parts


def test_contained_optimizers_are_added_up():
    scaled = model_with(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))
    assert planned(scaled, 2) == planned(model_with(keras.optimizers.Adam()), 2)


def test_what_cannot_be_divided_is_an_error():
    with pytest.raises(ValueError, match="adam cannot be divided: 5 processes are too many"):
        planned(model_with(keras.optimizers.Adam(name="adam")), 5)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match="expected a model that is built, and compiled"):
        planned(model, 2)
