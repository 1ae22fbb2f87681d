import keras
import tensorflow as tf

import tfdist
from tfdist.optimizers.keras_optimizers import gradients_of


def test_whose_gradients_are_averaged():
    tfdist.init()
    optimizer = tfdist.DistributedOptimizer(keras.optimizers.SGD())
    assert gradients_of(optimizer) is gradients_of(keras.optimizers.LossScaleOptimizer(optimizer)) is not None
    assert gradients_of(keras.optimizers.SGD()) is None
    assert gradients_of(None) is gradients_of("sgd") is None


def test_xla_is_off():
    tfdist.init()
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
    model.compile(tfdist.DistributedOptimizer(keras.optimizers.SGD()), "mse", jit_compile=True)
    model.fit(tf.ones([4, 3]), tf.ones([4, 1]), verbose=0)
    assert not model.jit_compile
    model.compile(keras.optimizers.SGD(), "mse", jit_compile=True)
    model.make_train_function()
    assert model.jit_compile
