import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.strategies import current_strategy
from tfdist.strategies.abilities import Ability, DataParallel


@pytest.fixture
def strategy(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    return tfdist.AllReduceStrategy(devices=["CPU:0"])


@pytest.fixture(params=["none", "mirrored", "one device"])
def other(request):
    return {
        "none": tf.distribute.get_strategy,
        "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0"]),
        "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
    }[request.param]()


class Another(Ability):
    """An ability that no strategy has."""


def test_missing_ability_yields_none(strategy):
    assert current_strategy.of_strategy(strategy, Another) is None
    with strategy.scope():
        assert current_strategy.current(Another) is None


def test_sharing_returns_extended_inside_a_shared_replica(strategy):
    results = []

    def step():
        results.append(current_strategy.sharing())
        with strategy.extended.shares.replica(tf.constant(3, tf.int64)):
            results.append(current_strategy.sharing())

    strategy.run(step)
    assert results == [None, strategy.extended]
    assert current_strategy.sharing() is None


def test_of_strategy_returns_its_extended(strategy):
    assert current_strategy.of_strategy(strategy, DataParallel) is strategy.extended


def test_tensorflow_strategies_have_no_ability(other):
    assert current_strategy.of_strategy(other, Ability) is None
    with other.scope():
        assert current_strategy.current(Ability) is None


def test_objects_without_strategy_have_no_ability():
    assert current_strategy.of_strategy(None, Ability) is None
    assert current_strategy.of_model(object(), Ability) is None


def test_current_is_set_in_scope_and_replicas(strategy):
    assert current_strategy.current(Ability) is None
    with strategy.scope():
        assert current_strategy.current(Ability) is strategy.extended
    assert current_strategy.current(Ability) is None
    results = []
    strategy.run(lambda: results.append(current_strategy.current(Ability)))
    assert results == [strategy.extended]


def test_of_model_returns_extended_outside_the_scope(strategy):
    """Also outside of the scope that it was built in, where `fit` runs."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    assert current_strategy.of_model(model, Ability) is strategy.extended
    assert (
        current_strategy.of_model(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]), Ability) is None
    )
