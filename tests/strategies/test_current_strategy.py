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


def test_an_ability_that_it_lacks(strategy):
    assert current_strategy.of_strategy(strategy, Another) is None
    with strategy.scope():
        assert current_strategy.current(Another) is None


def test_a_step_is_on_shares_in_a_replica_that_has_one(strategy):
    found = []

    def step():
        found.append(current_strategy.sharing())
        with strategy.extended.shares.replica(tf.constant(3, tf.int64)):
            found.append(current_strategy.sharing())

    strategy.run(step)
    assert found == [None, strategy.extended]
    assert current_strategy.sharing() is None


def test_of_a_strategy(strategy):
    assert current_strategy.of_strategy(strategy, DataParallel) is strategy.extended


def test_other_strategies_are_not_at_work(other):
    assert current_strategy.of_strategy(other, Ability) is None
    with other.scope():
        assert current_strategy.current(Ability) is None


def test_what_is_no_strategy():
    assert current_strategy.of_strategy(None, Ability) is None
    assert current_strategy.of_model(object(), Ability) is None


def test_in_its_scope_and_in_its_replicas(strategy):
    assert current_strategy.current(Ability) is None
    with strategy.scope():
        assert current_strategy.current(Ability) is strategy.extended
    assert current_strategy.current(Ability) is None
    found = []
    strategy.run(lambda: found.append(current_strategy.current(Ability)))
    assert found == [strategy.extended]


def test_of_a_model(strategy):
    """Also outside of the scope that it was built in, where `fit` runs."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    assert current_strategy.of_model(model, Ability) is strategy.extended
    assert (
        current_strategy.of_model(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]), Ability) is None
    )
