"""Lookups and gradients of rows, without a layer."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.errors import TfdistError
from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.tables.client import InProcess, TableClient, TableConnections, TableSpec
from tfdist.strategies.embeddings.embedded_rows import EmbeddedRows, rows_of

DIM = 2
INITIAL = InitialRows(seed=3)


def made(optimizer=None):
    table = TableClient(TableConnections([InProcess()]), "rows", TableSpec(DIM, INITIAL, RowPolicy()))
    rows = EmbeddedRows(table, optimizer)
    anchor = keras.Variable(np.zeros((0, DIM), np.float32))
    rows.put_behind(anchor)
    return rows, anchor


def initial(*keys):
    return INITIAL.rows(np.array(keys, np.int64), DIM, np.dtype(np.float32))


def gradient_of(rows, anchor, keys, factor=1.0):
    with tf.GradientTape() as tape:
        embedded = rows.lookup(anchor, tf.constant(keys, tf.int64), True)
        loss = factor * tf.reduce_sum(embedded**2) / 2
    return tape.gradient(loss, anchor.value)


@pytest.mark.parametrize("shape", [(), (4,), (2, 2), (0,), (2, 0, 3)])
def test_rows_have_the_keys_shape(shape):
    rows, anchor = made()
    keys = np.arange(np.prod(shape, dtype=int)).reshape(shape) - 2
    expected = initial(*keys.ravel()).reshape(*shape, DIM)
    np.testing.assert_array_equal(rows.lookup(anchor, tf.constant(keys, tf.int64), False), expected)

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def of_any_rank(keys):
        return rows.lookup(anchor, keys, False)

    np.testing.assert_array_equal(of_any_rank(keys), expected)
    assert rows_of(anchor) is rows
    assert rows_of(keras.Variable(1.0)) is None


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_have_unique_keys_and_summed_rows(compiled):
    rows, anchor = made()

    def compute():
        gradient = gradient_of(rows, anchor, [7, -9, 7])
        return gradient.indices, gradient.values

    keys, values = tf.function(compute)() if compiled else compute()
    np.testing.assert_array_equal(keys, [7, -9])
    np.testing.assert_allclose(values, initial(7, -9) * [[2], [1]])


def test_a_tape_sees_the_anchor_only():
    rows, anchor = made()
    with tf.GradientTape() as tape:
        rows.lookup(anchor, tf.constant([7], tf.int64), True)
    assert [variable is anchor.value for variable in tape.watched_variables()] == [True]


def test_an_update_reaches_the_rows():
    rows, anchor = made()
    rows.update(keras.optimizers.SGD(0.5), gradient_of(rows, anchor, [7, -9, 7]))
    keys, values = rows.export()
    assert keys.tolist() == [-9, 7]
    np.testing.assert_allclose(values, initial(-9, 7) * [[0.5], [0]], atol=1e-7)


def test_update_uses_current_learning_rate():
    rows, anchor = made()
    optimizer = keras.optimizers.SGD(0.5)
    for rate in (0.5, 0.1):
        optimizer.learning_rate = rate
        rows.update(optimizer, gradient_of(rows, anchor, [7]))
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5 * 0.9, rtol=1e-6)


def test_a_schedule_counts_the_rows_updates():
    rows, anchor = made()
    optimizer = keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.1, 0.0]))
    for _ in range(3):
        rows.update(optimizer, gradient_of(rows, anchor, [7]))
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5 * 0.9, rtol=1e-6)


def test_rows_may_have_their_own_optimizer():
    rows, anchor = made(keras.optimizers.serialize(keras.optimizers.SGD(0.25)))
    rows.update(keras.optimizers.Adam(1.0), gradient_of(rows, anchor, [7]))
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.75, rtol=1e-6)


def test_a_loss_scale_is_undone():
    rows, anchor = made()
    rows.update(keras.optimizers.SGD(0.5, loss_scale_factor=8.0), gradient_of(rows, anchor, [7], factor=8.0))
    np.testing.assert_allclose(rows.export()[1], initial(7) * 0.5, rtol=1e-6)


def test_changed_optimizer_is_sent_to_the_table():
    """Also one that is made where another one was."""
    rows, anchor = made()
    for optimizer in (keras.optimizers.SGD, keras.optimizers.Adam, keras.optimizers.SGD):
        before = rows.lookup(anchor, tf.constant([7], tf.int64), True)
        rows.update(optimizer(0.5), gradient_of(rows, anchor, [7]))
        gc.collect()
        expected = before * 0.5 if optimizer is keras.optimizers.SGD else before - 0.5 * np.sign(before)
        np.testing.assert_allclose(rows.export()[1], expected, rtol=1e-2)


def test_unsupported_updates_raise():
    rows, anchor = made()
    with pytest.raises(TfdistError, match="use clipvalue="):
        rows.update(keras.optimizers.Adam(clipnorm=1.0), gradient_of(rows, anchor, [7]))
    with pytest.raises(TypeError, match="must reach the optimizer as they are"):
        rows.update(keras.optimizers.SGD(), tf.zeros((0, DIM)))
