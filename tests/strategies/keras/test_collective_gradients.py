"""Gradients through collectives between replicas, of losses that count by their shares."""

import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import in_step, on_ranks
from tfdist.private import tensorflow as private
from tfdist.strategies.keras.collective_gradients import received, sent

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def normalized(x, mean):
    return tf.reduce_mean((x - mean) ** 3)


@pytest.mark.parametrize("sizes", [(3, 3), (5, 1), (6, 0)])
def test_synchronized_statistics_have_the_gradient_of_one_process(ranks, sizes):
    """The loss is the mean over shares, weighted by samples, of losses that use the mean over all samples."""
    scale = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        x = scale * X
        loss = normalized(x, tf.reduce_mean(x, 0))
    expected = tape.gradient(loss, scale)

    def work(strategy):
        rows = X[: sizes[0]] if strategy.rank == 0 else X[sizes[0] :]
        factor = tf.constant(2.0)

        def step():
            with tf.GradientTape() as tape:
                tape.watch(factor)
                x = factor * (rows if len(rows) else np.zeros((1, 3), np.float32))
                partial_mean = tf.reduce_sum(x[: len(rows)], 0) / len(X)
                mean = tf.distribute.get_replica_context().all_reduce("SUM", partial_mean)
                loss = normalized(x, mean)
            weight = tf.cast(strategy.extended.shares.weight(), tf.float32)
            return tape.gradient(loss, factor) * weight

        return in_step(strategy, sizes[strategy.rank], len(X), step)

    gradients = on_ranks(ranks(2), work)
    np.testing.assert_allclose(sum(part.numpy() for part in gradients), expected, rtol=1e-4)


def gradient(strategy, collective, dtype=tf.float32):
    given = tf.constant([1.0, 2.0], dtype)

    def step():
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = collective(tf.distribute.get_replica_context(), given)
        return tape.gradient(result, given)

    return step


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.complex64])
@pytest.mark.parametrize(
    "collective",
    [lambda replica, x: replica.all_reduce("SUM", x), lambda replica, x: replica.all_gather(x, axis=0)],
    ids=["all_reduce", "all_gather"],
)
def test_collective_gradients_scale_by_sender_and_receiver_weights(ranks, collective, dtype):
    """Rank 0 has three of four samples: from it come three quarters, and rank 1 gets the sum over its own quarter."""

    def work(strategy):
        return in_step(strategy, (3, 1)[strategy.rank], 4, gradient(strategy, collective, dtype))

    first, second = on_ranks(ranks(2), work)
    assert first.dtype == second.dtype == dtype
    np.testing.assert_allclose(tf.cast(first, tf.complex64), [4 / 3] * 2, rtol=1e-2)
    np.testing.assert_allclose(tf.cast(second, tf.complex64), [4] * 2, rtol=1e-2)


def test_reductions_of_gradients_themselves_are_not_weighed_again(ranks):
    def collective(replica, x):
        return replica.all_reduce("SUM", [x], private.WeighedOptions())[0]

    for derivative in on_ranks(
        ranks(2), lambda strategy: in_step(strategy, 3 - 2 * strategy.rank, 4, gradient(strategy, collective))
    ):
        np.testing.assert_array_equal(derivative, [2, 2])


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather"])
def test_collective_values_are_not_weighted(ranks, collective):
    """Integers and nested values are unchanged, too; only gradients are weighted."""

    def work(strategy):
        def step():
            replica = tf.distribute.get_replica_context()
            value = {"a": tf.constant([strategy.rank]), "b": [tf.constant([0.5])]}
            return replica.all_reduce("SUM", value) if collective == "all_reduce" else replica.all_gather(value, axis=0)

        return tf.nest.map_structure(lambda part: part.numpy().tolist(), in_step(strategy, 1, 4, step))

    expected = {"a": [1], "b": [[1.0]]} if collective == "all_reduce" else {"a": [0, 1], "b": [[0.5, 0.5]]}
    assert on_ranks(ranks(2), work) == [expected] * 2


def test_outside_of_steps_gradients_are_tensorflows(ranks):
    def work(strategy):
        return strategy.run(gradient(strategy, lambda replica, x: replica.all_reduce("SUM", x)))

    for derivative in on_ranks(ranks(2), work):
        np.testing.assert_array_equal(derivative, [2, 2])


def test_losses_of_gradients_count_by_their_own_share(ranks):
    """A penalty on a slope that depends on what processes compute together, as in a layer that is split."""
    x, factor = tf.constant([1.0]), tf.constant(3.0)

    def work(strategy):
        def step():
            with tf.GradientTape() as tape:
                tape.watch(factor)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    result = received(factor * sent(x))
                loss = inner.gradient(result, x) ** 2
            return tape.gradient(loss, factor)

        return in_step(strategy, (3, 1)[strategy.rank], 4, step)

    np.testing.assert_allclose(on_ranks(ranks(2), work), [0.75 * 2 * 3, 0.25 * 2 * 3])
