"""Weights of which a process keeps some rows; `test_gathering.py` has whole ones."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.sharding import Ownership
from tfdist.strategies.divided import described_variables, weight_parts

described_variables.install()
WHOLE = np.arange(10.0, dtype="float32").reshape(5, 2)


@pytest.fixture
def variable():
    """A variable of which this process has the last three rows of five; others' are read as zeros."""
    made = keras.Variable(tf.zeros((5, 2)), name="kernel")

    def make(initializer):
        made._value = tf.Variable(initializer(made.shape))

    def read(weight):
        return tf.concat([tf.zeros([2, 2]), weight.copy.read_value()], 0)

    collectives = types.SimpleNamespace(read=read, assign=lambda weight, value: weight.assign(value))
    weight_parts.keep(made, tf.constant(WHOLE), Ownership(None, (0, 2, 5)), 1, make, collectives)
    return made


def test_only_the_rows_have_memory(variable):
    kept = weight_parts.of(variable)
    np.testing.assert_array_equal(kept.copy.numpy(), WHOLE[2:])
    assert variable._value is None
    assert isinstance(variable, keras.Variable)
    assert variable.shape == (5, 2)
    assert kept.spec == tf.TensorSpec([5, 2])
    np.testing.assert_array_equal(variable.numpy(), [[0, 0], [0, 0], *WHOLE[2:]])


def test_assignments_take_the_own_rows(variable):
    variable.assign(WHOLE + 1)
    np.testing.assert_array_equal(weight_parts.of(variable).copy.numpy(), WHOLE[2:] + 1)
    with pytest.raises(ValueError, match="must match"):
        variable.assign(WHOLE[2:])


def test_tapes_find_the_rows(variable):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight_parts.of(variable).copy ** 2)
    gradient = tape.gradient(loss, variable)
    np.testing.assert_array_equal(gradient, 2 * WHOLE[2:])
    assert weight_parts.is_part(gradient, variable)
    assert not weight_parts.is_part(tf.zeros((5, 2)), variable)
    assert not weight_parts.is_part(gradient, keras.Variable(WHOLE[2:]))


def test_gradients_of_unknown_shape_are_not_known_for_parts(variable):
    @tf.function(input_signature=[tf.TensorSpec(None)])
    def is_part(gradient):
        assert gradient.shape.rank is None
        return tf.constant(weight_parts.is_part(gradient, variable))

    assert not is_part(tf.zeros((3, 2)))
