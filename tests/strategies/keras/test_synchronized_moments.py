"""Moments over all ranks, and their gradients, in one collective each way."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import in_step, on_ranks
from tfdist.private.keras import tf_nn

ROWS = np.random.default_rng(0).normal(2, 3, size=(9, 4, 2)).astype(np.float32)


@pytest.mark.parametrize("keepdims", [False, True])
def test_moments_equal_those_of_all_rows(ranks, keepdims):
    def work(strategy):
        begin, end = ((0, 6), (6, 9))[strategy.rank]
        statistics = strategy.extended.group.engine.statistics

        @tf.function
        def moments():
            rows = tf.constant(ROWS[begin:end])
            with tf.GradientTape() as tape:
                tape.watch(rows)
                mean, variance = tf_nn._compute_moments_sync(rows, [0, 1], keepdims)
                loss = tf.reduce_sum(mean * [1.0, 2.0]) + tf.reduce_sum(variance * [3.0, 4.0])
            return mean, variance, tape.gradient(loss, rows)

        in_step(strategy, end - begin, 9, moments)
        before = statistics.collectives
        mean, variance, gradient = (part.numpy() for part in in_step(strategy, end - begin, 9, moments))
        return statistics.collectives - before, mean, variance, gradient

    results = on_ranks(ranks(2), work)
    axes = (0, 1)
    expected = ROWS.mean(axes, keepdims=keepdims), ROWS.var(axes, keepdims=keepdims)
    for calls, mean, variance, _ in results:
        assert calls == 2
        np.testing.assert_allclose(mean, expected[0], rtol=1e-4)
        np.testing.assert_allclose(variance, expected[1], rtol=1e-4)
    # Each rank's loss counts by its rows: the sum of losses that are weighted by 6/9 and 3/9 is one loss.
    count = ROWS.shape[0] * ROWS.shape[1]
    of_one = (np.array([1.0, 2.0]) + 2 * np.array([3.0, 4.0]) * (ROWS - ROWS.mean(axes))) / count
    for (begin, end), (_, _, _, gradient) in zip(((0, 6), (6, 9)), results, strict=True):
        np.testing.assert_allclose(gradient * (end - begin) / 9, of_one[begin:end], rtol=1e-3, atol=1e-5)


def test_moments_outside_replicas_equal_keras(ranks):
    def work(strategy):
        return [part.numpy() for part in tf_nn._compute_moments_sync(tf.constant(ROWS), [0, 1], False)]

    for mean, variance in on_ranks(ranks(2), work):
        np.testing.assert_allclose(mean, ROWS.mean((0, 1)), rtol=1e-4)
        np.testing.assert_allclose(variance, ROWS.var((0, 1)), rtol=1e-4)


@pytest.mark.parametrize("axis", [-1, 1])
def test_moments_of_masked_rows_equal_those_of_one_process(ranks, axis):
    layer, mask = keras.layers.BatchNormalization(axis, synchronized=True), ROWS[..., 0] > 2
    layer.build(ROWS.shape)
    expected = layer._moments(tf.constant(ROWS), tf.constant(mask))

    def work(strategy):
        begin, end = ((0, 6), (6, 9))[strategy.rank]
        rows, of_rows = tf.constant(ROWS[begin:end]), tf.constant(mask[begin:end])
        moments = tf.function(lambda: layer._moments(rows, of_rows))
        return [part.numpy() for part in in_step(strategy, end - begin, 9, moments)]

    for results in on_ranks(ranks(2), work):
        for moment, of_all in zip(results, expected, strict=True):
            np.testing.assert_allclose(moment, of_all, rtol=1e-5)


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_variance_beside_a_large_mean_is_exact(ranks, is_masked):
    rows = ROWS + 20_000
    layer = keras.layers.BatchNormalization(synchronized=True)
    layer.build(rows.shape)

    def work(strategy):
        begin, end = ((0, 6), (6, 9))[strategy.rank]
        mask = tf.ones([end - begin, 4], tf.bool) if is_masked else None
        moments = tf.function(lambda: layer._moments(tf.constant(rows[begin:end]), mask))
        return [part.numpy() for part in in_step(strategy, end - begin, 9, moments)]

    for mean, variance in on_ranks(ranks(2), work):
        np.testing.assert_allclose(mean, rows.mean((0, 1), dtype=np.float64), rtol=1e-6)
        np.testing.assert_allclose(variance, rows.var((0, 1), dtype=np.float64), rtol=1e-3)


def test_a_replica_without_samples_adds_nothing(ranks):
    """As in a loop, whose last batch has fewer rows than there are replicas."""

    def work(strategy):
        rows = tf.constant(ROWS[: 4 * (strategy.rank == 0)])
        moments = tf.function(lambda: tf_nn._compute_moments_sync(rows, [0, 1], False))
        return [part.numpy() for part in in_step(strategy, len(rows), 4, moments)]

    for mean, variance in on_ranks(ranks(2), work):
        np.testing.assert_allclose(mean, ROWS[:4].mean((0, 1)), rtol=1e-5)
        np.testing.assert_allclose(variance, ROWS[:4].var((0, 1)), rtol=1e-5)
