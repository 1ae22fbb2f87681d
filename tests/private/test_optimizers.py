"""Private members of Keras's optimizers, on optimizers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.private import optimizers


@pytest.fixture
def variables():
    return [keras.Variable(np.ones(2, np.float32), name=f"v{number}") for number in range(2)]


@pytest.fixture
def made(variables):
    optimizer = keras.optimizers.SGD(
        0.5, momentum=0.5, use_ema=True, weight_decay=0.1, gradient_accumulation_steps=2, global_clipnorm=1.0
    )
    optimizer.exclude_from_weight_decay(var_list=variables[1:])
    optimizer.build(variables)
    return optimizer


def test_variables_averages_and_decay_are_found(made, variables):
    assert optimizers.variables_of(made) == variables
    assert optimizers.variables_of(keras.optimizers.SGD()) == []
    assert [variable.shape for variable in optimizers.averages_of(made)] == [(2,), (2,)]
    assert optimizers.averages_of(keras.optimizers.SGD()) == []
    assert [optimizers.place_of(made, variable) for variable in variables] == [0, 1]
    assert len({optimizers.key_of(variable) for variable in variables}) == 2
    assert [optimizers.place_of(made, variable.value) for variable in variables] == [0, 1]
    assert all(optimizers.key_of(variable) == optimizers.key_of(variable.value) for variable in variables)
    assert [optimizers.decays(made, variable) for variable in variables] == [True, False]


def test_accumulated_gradients_and_apply_count_are_read(made, variables):
    assert optimizers.accumulated_by(keras.optimizers.SGD()) == []
    made.apply([tf.constant([1.0, 2.0]), tf.zeros(2)], variables)
    np.testing.assert_array_equal(optimizers.accumulated_by(made)[0].numpy(), [1.0, 2.0])
    assert (int(optimizers.apply_count(made).value), int(made.iterations)) == (1, 0)


def test_own_clipping_is_told_from_that_of_keras(made):
    class Clipping(keras.optimizers.Adam):
        def _clip_gradients(self, grads):
            return grads

    class Derived(Clipping):
        pass

    assert [optimizers.clips_itself(each) for each in (made, Clipping(), Derived())] == [False, True, True]


def test_gradients_are_clipped(made):
    clipped = optimizers.clipped(made, [tf.constant([3.0, 0.0]), tf.constant([0.0, 4.0])])
    np.testing.assert_allclose(clipped, [[0.6, 0.0], [0.0, 0.8]], rtol=1e-6)


def test_learning_rate_is_schedule_variable_or_none(made):
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert optimizers.learning_rate(keras.optimizers.SGD(schedule)) is schedule
    assert optimizers.learning_rate(made) is made.learning_rate
    assert optimizers.learning_rate(object()) is None


def test_strategy_of_returns_strategy_or_default(made):
    assert optimizers.strategy_of(object(), "otherwise") == "otherwise"
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert optimizers.strategy_of(keras.optimizers.SGD()) is tf.distribute.get_strategy()
    assert optimizers.strategy_of(made) is tf.distribute.get_strategy()
