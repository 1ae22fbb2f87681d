"""Keras optimizers, and the rows behind anchors."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.embeddings.test_embedded_rows import gradient_of, initial, made
from tfdist.strategies.embeddings import keras_embeddings
from tfdist.strategies.keras import keras_seams

keras_seams.install()
keras_embeddings.install()


@pytest.mark.parametrize("given", [True, False])
def test_variables_and_rows_are_updated_once(given):
    rows, anchor = made()
    variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.5)
    variables = [anchor, variable]
    optimizer.build(variables)
    gradient = gradient_of(rows, anchor, [7])
    optimizer.apply([gradient, tf.constant(1.0)], *([variables] if given else []))
    assert float(variable) == 0.5
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5, rtol=1e-6)
    assert int(optimizer.iterations) == 1
    optimizer.apply([None, tf.constant(1.0)], variables)
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5, rtol=1e-6)


def test_rows_alone_count_as_an_update():
    rows, anchor = made()
    optimizer = keras.optimizers.SGD(0.5)
    optimizer.apply_gradients([(gradient_of(rows, anchor, [7]), anchor)])
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5, rtol=1e-6)
    assert int(optimizer.iterations) == 1


def test_an_optimizer_has_the_same_variables_however_it_is_built():
    """Else Keras would not load its state."""
    paths = []
    for build in (True, False):
        rows, anchor = made()
        variable, optimizer = keras.Variable(1.0), keras.optimizers.Adam(name="adam")
        if build:
            optimizer.build([anchor, variable])
        optimizer.apply([gradient_of(rows, anchor, [7]), tf.constant(1.0)], [anchor, variable])
        paths.append([tuple(state_variable.shape) for state_variable in optimizer.variables])
    assert paths[0] == paths[1]


def test_steps_that_are_not_finite_are_skipped():
    rows, anchor = made()
    variable = keras.Variable(1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0)

    @tf.function
    def step(factor):
        gradient = gradient_of(rows, anchor, [7], factor=4.0 * factor)
        optimizer.apply([gradient, tf.constant(4.0)], [anchor, variable])

    step(tf.constant(1.0))
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5, rtol=1e-6)
    step(tf.constant(np.inf))
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5, rtol=1e-6)
    assert float(variable) == 0.5
