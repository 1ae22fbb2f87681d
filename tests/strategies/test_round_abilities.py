"""When Keras calls upon what `TrainsInRounds` declares."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.runtime import world
from tfdist.strategies.all_reduce.extended import AllReduceExtended
from tfdist.strategies.keras import keras_seams
from tfdist.strategies.round_abilities import ElasticMembership, TrainsInRounds
from tfdist.strategies.rounds import keras_rounds

X = np.random.default_rng(0).normal(size=(20, 4))
Y = X @ np.array([[1.0], [-2.0], [0.5], [3.0]])


class Recording(AllReduceExtended, TrainsInRounds):
    """Writes down what it is asked to do, and trains as Keras does."""

    def __init__(self, strategy):
        super().__init__(strategy, world.alone().group, ["CPU:0"])
        self.calls = []

    def build(self, optimizer, variables):
        self.calls.append("build")
        optimizer.build(variables)

    def step_begins(self, optimizer):
        self.calls.append("step begins")

    def step_taken(self, optimizer):
        self.calls.append("step taken")

    def begin_rounds(self, model, anew):
        self.calls.append("begin anew" if anew else "begin")

    def settle(self, model):
        self.calls.append("settle")

    def outer_states(self, model):
        return []

    def restore_outer(self, model, states):
        self.calls.append("restore")

    def distance(self, model):
        return None

    def staleness(self, model):
        return Counter()

    def assigned(self, variable):
        self.calls += ["assigned"] * variable.trainable  # metrics are reset at each epoch

    def moving_averages(self, model):
        return []


def strategy_of(extended):
    class Strategy(tf.distribute.MirroredStrategy):
        def __init__(self):
            super().__init__(["CPU:0"])
            keras_seams.install()
            keras_rounds.install()
            self._extended = extended(self)

    return Strategy()


def trained(strategy, epochs):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model.fit(X, Y, batch_size=10, epochs=epochs, shuffle=False, verbose=0)
    return model


def test_rounds_follow_the_course_of_fit():
    strategy = strategy_of(Recording)
    model = trained(strategy, epochs=2)
    calls = strategy.extended.calls
    step = ["step begins", "step taken"]
    if "build" in calls:  # some versions of Keras build the optimizer in `compile`
        calls.remove("build")
    assert calls == ["settle", "begin anew", *(["begin", *step, *step, "settle"] * 2)]
    calls.clear()
    model.evaluate(X, Y, verbose=0)
    model.predict(X, verbose=0)
    assert calls == ["settle", "settle"]
    calls.clear()
    model.set_weights(model.get_weights())
    assert calls == ["assigned", "assigned"], "a kernel and a bias"
    for weight, other in zip(model.get_weights(), trained(tf.distribute.get_strategy(), 2).get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)


def test_ability_without_required_methods_raises():
    class Coming(Recording, ElasticMembership):
        pass

    with pytest.raises(TypeError, match="begin_fit"):
        strategy_of(Coming)
