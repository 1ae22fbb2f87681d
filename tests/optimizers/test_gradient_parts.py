import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.optimizers.gradient_parts import GradientParts, dtype_of_sums

PARTS = np.random.default_rng(0).normal(3.0, 1.0, size=(6, 4))
"""Gradients of the parts of two updates."""


@pytest.mark.parametrize("shape", [(4,), ()], ids=["by weight", "of all"])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_squared_deviations_of_each_update_equal_numpy(shape, scale):
    """Also where they are small beside the mean; means may be changed, and what follows them gets the change."""
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=3, clipvalue=0.5)
    variable, total = keras.Variable(np.zeros(4), dtype="float64"), keras.Variable(np.zeros(shape), dtype="float64")
    optimizer.build([variable])
    deviations = tf.Variable(np.zeros((2, *shape)))

    def changed(means, variables, squares):
        assert [passed is variable for passed in variables] == [True]
        deviations[optimizer.iterations].assign(squares[0])
        return [tf.ones_like(means[0])]

    GradientParts(optimizer, lambda variable: total, changed)
    step = tf.function(lambda part: optimizer.apply([part], [variable]))
    parts = 3 + scale * (PARTS - 3)
    for part in parts:
        step(tf.constant(part))
    wanted = [3 * update.var(axis=0) for update in parts.reshape(2, 3, 4)]
    wanted = wanted if shape else np.sum(wanted, axis=1)
    np.testing.assert_allclose(deviations, wanted, rtol=1e-6 if scale == 1.0 else 1e-4)
    np.testing.assert_array_equal(variable.numpy(), np.full(4, -1.0))


def test_infinite_gradient_does_not_affect_next_update():
    optimizer = keras.optimizers.SGD(0.0, gradient_accumulation_steps=2)
    variable, total = keras.Variable(np.zeros(1, np.float32)), keras.Variable(np.zeros(1, np.float32))
    optimizer.build([variable])
    deviations = []
    GradientParts(
        optimizer, lambda variable: total, lambda means, variables, squares: deviations.append(squares[0]) or means
    )
    for part in (np.inf, 1.0, 1.0, 2.0):
        optimizer.apply([tf.constant([part])], [variable])
        optimizer._accumulated_gradients[0].assign([0.0 if part == np.inf else optimizer._accumulated_gradients[0][0]])
    np.testing.assert_allclose(deviations[-1], [0.5])


def test_sums_have_32_bits_or_more():
    dtypes = {"float16": tf.float32, "bfloat16": tf.float32, "float32": tf.float32, "float64": tf.float64}
    assert {name: dtype_of_sums(keras.Variable(0.0, dtype=name)) for name in dtypes} == dtypes
    assert dtype_of_sums(tf.Variable(0.0, dtype=tf.float16)) == tf.float32
