"""Sums of gradients over micro-batches."""

import keras
import numpy as np
import tensorflow as tf

from tfdist.pipeline.gradients import GradientSums


def rows(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant([4, 2]))


def test_dense_and_sparse_parts():
    dense, sparse, mixed, none = (keras.Variable(np.zeros([4, 2], "float32")) for _ in range(4))
    gradients = GradientSums()
    gradients.add(dense, tf.ones([4, 2]))
    assert float(gradients.add(dense, 2 * tf.ones([4, 2]))[0, 0]) == 3
    for variable in (sparse, mixed):
        gradients.add(variable, rows([[1.0, 2.0]], [1]))
        gradients.add(variable, rows([[3.0, 4.0]], [1]))
    gradients.add(mixed, tf.ones([4, 2]))
    gradients.add(none, None)
    np.testing.assert_array_equal(gradients.of(dense), np.full([4, 2], 3))
    slices = gradients.of(sparse)
    np.testing.assert_array_equal(slices.indices, [1, 1])
    np.testing.assert_array_equal(slices.values, [[1, 2], [3, 4]])
    np.testing.assert_array_equal(gradients.of(mixed), [[1, 1], [5, 7], [1, 1], [1, 1]])
    assert gradients.of(none) is None


def test_slices_with_equal_indices_are_summed_others_concatenated():
    table = keras.Variable(np.zeros([4, 2], "float32"))

    @tf.function(autograph=False)
    def step(batch):
        gradients = GradientSums()
        for number in range(2):
            words = tf.IndexedSlices(tf.ones([3, 2]), batch[number], tf.constant([4, 2]))
            gradients.add(table, words, "words")
            gradients.add(table, rows([[1.0, 2.0], [3.0, 4.0]], [0, 1]), "positions")
        slices = gradients.of(table)
        return slices.indices, slices.values

    indices, values = step(tf.constant([[1, 2, 3], [1, 0, 0]]))
    np.testing.assert_array_equal(indices, [1, 2, 3, 1, 0, 0, 0, 1])
    np.testing.assert_array_equal(values[6:], [[2, 4], [6, 8]])


def test_gradients_wait_for_given_operations():
    dense, sparse = keras.Variable(np.zeros([4, 2], "float32")), keras.Variable(np.zeros([4, 2], "float32"))
    waits = []

    @tf.function(autograph=False)
    def step():
        gradients = GradientSums()
        gradients.add(dense, tf.ones([4, 2]))
        gradients.add(sparse, rows([[1.0, 2.0]], [1]))
        last = tf.timestamp().op
        gradients.wait_for([last])
        sums = gradients.of(dense), gradients.of(sparse).values
        before = [*sums, *sums[0].op.inputs, *sums[1].op.inputs]
        waits.append(sum(last in tensor.op.control_inputs for tensor in before))
        return sums

    step()
    assert waits == [2]
