"""Kinds of sums: Adasum, compressed, clipped, of groups, of processes that have ended, and of scaled losses."""

import keras
import numpy as np
import tensorflow as tf
from world import X, Y, assert_alike, assert_equal, fit, make_model, plain_model, rank, share, size

import tfdist


def local():
    """A variable whose gradients are a process's own; gradients that are clipped before the sum."""
    model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD(0.1), scale_local_gradients=False))
    model.optimizer.register_local_var(model.layers[-1].bias)
    fit(model, share(X), share(Y))
    everyone = tfdist.all_gather(model.layers[-1].bias.value[None])
    assert len(np.unique(everyone, axis=0)) == size
    clipped = tf.Variable([0.0, 0.0])
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), local_clip_norm=1.0, local_clip_value=0.5)
    optimizer.apply([tf.constant([3.0 * (rank + 1), 4.0])], [clipped])
    gradients = [np.array([3.0 * (other_rank + 1), 4.0]) for other_rank in range(size)]
    expected = -np.mean([np.clip(gradient / np.linalg.norm(gradient), -0.5, 0.5) for gradient in gradients], axis=0)
    np.testing.assert_allclose(clipped, expected, rtol=1e-6)


def mixed():
    """Loss scales around the optimizer and inside of it; one process's infinity skips the step everywhere."""
    keras.backend.set_floatx("float32")
    scale, wrap = keras.optimizers.LossScaleOptimizer, tfdist.DistributedOptimizer
    for scaled in (
        lambda optimizer: scale(wrap(optimizer), initial_scale=8.0),
        lambda optimizer: wrap(scale(optimizer, initial_scale=8.0)),
        wrap,  # Keras scales by itself
    ):
        model = fit(make_model(scaled(keras.optimizers.SGD(0.1)), dtype="mixed_float16"), share(X), share(Y))
        plain = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
        assert_equal(model, fit(plain_model(plain, dtype="mixed_float16"), X, Y), 5e-3)
        assert_alike(model)
    variable = tf.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0)), 8.0)
    step = tf.function(lambda gradient: optimizer.apply([gradient], [variable]))
    optimizer.build([variable])
    step(tf.constant([np.inf if rank == size - 1 else 8.0]))
    assert variable.numpy() == [1.0]
    assert float(optimizer.dynamic_scale) == 4
    step(tf.constant([4.0 * rank]))
    np.testing.assert_allclose(variable, [1 - (size - 1) / 2])


def compressed():
    """Compresses the gradient of a large variable; the elements that are left out come later."""
    variable = tf.Variable(tf.zeros([64, 64]))
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), tfdist.compression.TopK(0.25))
    gradient = tf.reshape(tf.range(1.0, 4097) * (rank + 1), [64, 64])
    optimizer.apply([gradient], [variable])
    mean = -np.arange(1, 4097).reshape(64, 64) * np.mean(np.arange(1, size + 1))
    np.testing.assert_allclose(variable, np.where(np.arange(4096).reshape(64, 64) < 3072, 0, mean), rtol=1e-6)
    for _ in range(3):
        optimizer.apply([tf.zeros([64, 64])], [variable])
    np.testing.assert_allclose(variable, mean, rtol=1e-6)


def adaptive():
    """What agrees is averaged, what is orthogonal is added; each variable by itself."""
    variables = [tf.Variable(tf.zeros([size])), tf.Variable([0.0, 0.0]), tf.Variable(tf.zeros([3, 1]))]
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), op=tfdist.Adasum, sparse_as_dense=True)
    rows = tf.IndexedSlices([[1.0]], [0], tf.constant([3, 1], tf.int64))
    tf.function(lambda: optimizer.apply([tf.one_hot(rank, size), tf.constant([3.0, 4.0]), rows], variables))()
    np.testing.assert_allclose(variables[0], -np.ones(size), rtol=1e-6)
    np.testing.assert_allclose(variables[1], [-3, -4], rtol=1e-6)
    np.testing.assert_allclose(variables[2], [[-1], [0], [0]], rtol=1e-6)
    orthogonal, parallel = tfdist.all_reduce([tf.one_hot(rank, size), tf.constant([5.0], tf.bfloat16)], tfdist.Adasum)
    np.testing.assert_allclose(orthogonal, np.ones(size), rtol=1e-6)
    assert float(parallel[0]) == 5


def groups():
    """Two groups train apart; an algorithm of one's own."""
    ranks = [list(range(0, size, 2)), list(range(1, size, 2))]
    made = [tfdist.Group(group_ranks) for group_ranks in ranks]
    members, place = ranks[rank % 2], rank // 2
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), group=made[rank % 2], algorithm="butterfly")
    variable = tf.Variable([0.0])
    optimizer.apply([tf.constant([rank + 1.0])], [variable])
    np.testing.assert_allclose(variable, [-np.mean([member + 1 for member in members])])
    assert members[place] == rank


def uneven():
    """A process that has fewer batches joins, as with functions."""
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variable = tf.Variable([0.0])
    optimizer.build([variable])
    for _ in range(2 if rank == 0 else 3):
        optimizer.apply([tf.constant([float(size)])], [variable])
    last = tfdist.join()
    tfdist.broadcast_variables([variable], root_rank=last)
    np.testing.assert_allclose(variable, [-(2.0 * size + size - 1)])
