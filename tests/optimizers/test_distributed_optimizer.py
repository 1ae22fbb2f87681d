"""In a process alone; `tests/multiprocess/test_distributed_optimizer.py` has several."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.optimizers.keras_optimizers import gradients_of


@pytest.fixture(autouse=True)
def initialized():
    tfdist.init()


def test_single_process_trains_like_wrapped_optimizer():
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    results = []
    for wrap in (lambda optimizer: optimizer, tfdist.DistributedOptimizer):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        model.compile(wrap(keras.optimizers.Adam(0.1, clipnorm=0.1)), "mse")
        model.fit(x, x[:, :1], epochs=2, verbose=0)
        results.append([variable.numpy() for variable in model.variables])
    for variable, other in zip(*results, strict=True):
        np.testing.assert_array_equal(variable, other)


def test_wrapping_returns_the_same_optimizer():
    optimizer = keras.optimizers.Adam(0.1)
    assert tfdist.DistributedOptimizer(optimizer) is optimizer
    assert type(optimizer) is keras.optimizers.Adam


def test_copies_are_plain_optimizers():
    """As Keras makes them of what it saves; `fit` warns of them, and they can be wrapped."""
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.Adam(0.1))
    for plain in (copy.deepcopy(optimizer), keras.optimizers.Adam.from_config(optimizer.get_config())):
        assert gradients_of(plain) is None
        assert gradients_of(tfdist.DistributedOptimizer(plain)) is not None


def test_backward_passes_per_step_accumulates_gradients():
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    variable = tf.Variable([0.0])
    for gradient in (1.0, 3.0, 5.0):
        optimizer.apply([tf.constant([gradient])], [variable])
    assert variable.numpy() == [-2.0]
    same = tfdist.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=2), backward_passes_per_step=2)
    assert same.gradient_accumulation_steps == 2


def test_part_of_a_backward_pass_raises():
    with pytest.raises(ValueError, match=r"backward_passes_per_step must be a whole number of at least 1; got 1\.5"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=1.5)


def test_conflicting_backward_passes_per_step_raises():
    with pytest.raises(ValueError, match="accumulates 3 gradients already"):
        tfdist.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=3), backward_passes_per_step=2)
    optimizer = keras.optimizers.SGD()
    optimizer.build([tf.Variable([0.0])])
    with pytest.raises(ValueError, match="when it is built: wrap it before"):
        tfdist.DistributedOptimizer(optimizer, backward_passes_per_step=2)
