import keras
import numpy as np
import pytest

import tfdist


@pytest.fixture
def model():
    strategy = tfdist.AllReduceStrategy(delay=1)
    with strategy.scope():
        made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
    return made


def test_sums_belong_to_optimizers(model):
    extended = model.distribute_strategy.extended
    sums = extended.delayed_sums(model.optimizer, model.trainable_variables)
    assert extended.delayed_sums(model.optimizer, model.trainable_variables) is sums
    assert extended.delayed_of(model) == [(model.optimizer, sums)]
    with model.distribute_strategy.scope():
        other = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        other.compile("sgd", "mse")
    assert extended.delayed_of(other) == []
    sums.staleness[1] += 2
    assert extended.staleness(model) == {1: 2}


def test_delayed_gradients_of_fewer_variables_raise(model):
    extended = model.distribute_strategy.extended
    extended.delayed_sums(model.optimizer, model.trainable_variables)
    with pytest.raises(ValueError, match="give it the gradients of all its variables in each step"):
        extended.delayed_sums(model.optimizer, model.trainable_variables[:2])


@pytest.mark.parametrize("delay", [2, -1, 0.5, "1", None])
def test_invalid_delays_raise(delay):
    with pytest.raises(ValueError, match="must be 0 or 1 steps; got"):
        tfdist.AllReduceStrategy(delay=delay)


def test_settling_a_strategy_without_delay_does_nothing():
    strategy = tfdist.AllReduceStrategy()
    with strategy.scope():
        made = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        made.compile("sgd", "mse")
    made.train_on_batch(np.ones((2, 3)), np.ones((2, 1)))
    strategy.settle(made)
    assert int(made.optimizer.iterations) == 1
