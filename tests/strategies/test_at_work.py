import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist.strategies import at_work
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
    assert at_work.of_strategy(strategy, Another) is None
    with strategy.scope():
        assert at_work.current(Another) is None


def test_a_step_is_on_shares_in_a_replica_that_has_one(strategy):
    found = []

    def step():
        found.append(at_work.sharing())
        with strategy.extended.shares.replica(tf.constant(3, tf.int64)):
            found.append(at_work.sharing())

    strategy.run(step)
    assert found == [None, strategy.extended]
    assert at_work.sharing() is None


def test_of_a_strategy(strategy):
    assert at_work.of_strategy(strategy, DataParallel) is strategy.extended


def test_other_strategies_are_not_at_work(other):
    assert at_work.of_strategy(other, Ability) is None
    with other.scope():
        assert at_work.current(Ability) is None


def test_what_is_no_strategy():
    assert at_work.of_strategy(None, Ability) is None
    assert at_work.of_model(object(), Ability) is None


def test_in_its_scope_and_in_its_replicas(strategy):
    assert at_work.current(Ability) is None
    with strategy.scope():
        assert at_work.current(Ability) is strategy.extended
    assert at_work.current(Ability) is None
    found = []
    strategy.run(lambda: found.append(at_work.current(Ability)))
    assert found == [strategy.extended]


def test_of_a_model(strategy):
    """Also outside of the scope that it was built in, where `fit` runs."""
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    assert at_work.of_model(model, Ability) is strategy.extended
    assert at_work.of_model(keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]), Ability) is None
