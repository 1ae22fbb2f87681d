"""Losses of whole batches and of micro-batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.pipeline.micro_batches import MicroBatches
from tfdist.pipeline.objective import Objective

VALUES = np.arange(1.0, 6.0, dtype="float32")


def gradients(loss, of_batch, variables=(), scale=1.0):
    outputs = tf.constant(VALUES)
    batch = MicroBatches(outputs, 3)
    objective = Objective(loss, batch, of_batch, variables, scale)
    for number in range(3):
        objective.take(number, [batch.part(outputs, number)])
    results = [objective.gradients(number) for number in range(3)]
    return (
        batch.joined([gradient.output for (gradient,), _ in results]),
        [pair for _, pairs in results for pair in pairs],
        objective,
    )


def mean_square(outputs, number):
    return tf.reduce_mean(outputs[0] ** 2)


@pytest.mark.parametrize("of_batch", [True, False])
def test_mean_loss_and_gradients_equal_whole_batch(of_batch):
    gradient, _, objective = gradients(mean_square, of_batch)
    np.testing.assert_allclose(gradient, 2 * VALUES / 5, rtol=1e-6)
    np.testing.assert_allclose(tf.add_n(objective.losses), (VALUES**2).mean(), rtol=1e-6)


def test_nonlinear_loss_of_whole_batch_is_supported():
    gradient, _, _ = gradients(lambda outputs, number: tf.reduce_sum(outputs[0]) ** 2, True)
    np.testing.assert_allclose(gradient, np.full(5, 2 * VALUES.sum()))


@pytest.mark.parametrize("of_batch", [True, False])
def test_variables_used_by_the_loss_get_gradients(of_batch):
    class Weight:
        value = tf.Variable(2.0)

    weight = Weight()
    _, pairs, _ = gradients(lambda outputs, number: weight.value * tf.reduce_mean(outputs[0]), of_batch, [weight])
    assert all(variable is weight for variable, _ in pairs)
    np.testing.assert_allclose(tf.add_n([gradient for _, gradient in pairs]), VALUES.mean(), rtol=1e-6)


@pytest.mark.parametrize("of_batch", [True, False])
def test_gradients_are_scaled_and_losses_are_not(of_batch):
    gradient, _, objective = gradients(mean_square, of_batch, scale=1024.0)
    np.testing.assert_allclose(gradient, 1024 * 2 * VALUES / 5, rtol=1e-6)
    np.testing.assert_allclose(tf.add_n(objective.losses), (VALUES**2).mean(), rtol=1e-6)


@pytest.mark.parametrize("of_batch", [True, False])
def test_crossentropy_gradients_go_to_logits_of_softmax(of_batch):
    """Keras takes what a softmax was computed of, so that the output itself has no gradient."""
    logits = tf.random.stateless_normal([5, 3], (0, 0))
    labels = tf.constant([0, 1, 2, 0, 1])
    batch = MicroBatches(logits, 3)

    def loss(outputs, number):
        targets = labels if number is None else batch.part(labels, number)
        return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(targets, outputs[0]))

    objective = Objective(loss, batch, of_batch)
    for number in range(3):
        objective.take(number, [keras.activations.softmax(batch.part(logits, number))])
    parts = [objective.gradients(number)[0][0] for number in range(3)]
    assert all(part.output is None for part in parts)
    with tf.GradientTape() as tape:
        tape.watch(logits)
        whole = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
    np.testing.assert_allclose(tf.concat([part.logits for part in parts], 0), tape.gradient(whole, logits), rtol=1e-5)


def test_padding_row_of_empty_micro_batch_has_no_gradient():
    """Two samples in three micro-batches, of which the first has none."""
    outputs = tf.constant([1.0, 2.0])
    batch = MicroBatches(outputs, 3)
    objective = Objective(mean_square, batch, of_batch=True)
    for number in range(3):
        objective.take(number, [batch.part(outputs, number)])
    results = [objective.gradients(number)[0][0].output.numpy().tolist() for number in range(3)]
    assert results == [[0.0], [1.0], [2.0]]
