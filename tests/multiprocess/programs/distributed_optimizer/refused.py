"""Arguments that are refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from updates import sparse
from world import WORDS, X, Y, fit, make_model

import tfdist


def refused():
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam())
    for wrong, error, message in (
        (lambda: tfdist.DistributedOptimizer(optimizer), ValueError, "averages its gradients already"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer)), ValueError, "already"),
        (lambda: tfdist.DistributedOptimizer("adam"), TypeError, "takes a Keras 3 optimizer"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0), ValueError, "got 0"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), algorithm="star"), ValueError, "star"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), local_clip_norm=-1.0), ValueError, "positive"),
        (lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), op="max"), ValueError, "got 'max'"),
        (
            lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), tfdist.compression.Int8(), op=tfdist.Adasum),
            ValueError,
            "leave out compression=",
        ),
        (
            lambda: tfdist.all_reduce(tf.constant([1]), tfdist.Adasum),
            TypeError,
            r"floating-point tensors; got \['int32",
        ),
        (
            lambda: tfdist.DistributedOptimizer(keras.optimizers.SGD(), op=tfdist.Adasum).apply(
                [sparse(np.ones([1, 5]), [0])], [tf.Variable(tf.zeros([WORDS, 5], tf.float64))]
            ),
            TypeError,
            "pass sparse_as_dense=True",
        ),
        (lambda: tfdist.DistributedGradientTape(None), TypeError, "takes a tf.GradientTape"),
    ):
        with pytest.raises(error, match=message):
            wrong()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = make_model(tfdist.DistributedOptimizer(keras.optimizers.SGD()))
        with pytest.raises(RuntimeError, match="works without a strategy"):
            fit(model, X, Y)
