"""A small model on parameter servers that are threads of this process, and its reference without a strategy."""

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
Y = X[:, :2] ** 2


def with_momentum():
    """An optimizer that has slots, and less to trace than Adam."""
    return keras.optimizers.SGD(0.05, momentum=0.9)


def model_in(strategy=None, optimizer=with_momentum, hidden=(), **options):
    """A model under a strategy; or a reference, which is eager, as it would trace longer than it trains.

    Args:
        strategy: strategy to make it under; None for a reference.
        optimizer: optimizer, its name, or a function that makes it.
        hidden: units of each layer before the last one, where a test is about several layers.
        options: other arguments of ``compile``.
    """
    keras.utils.set_random_seed(0)
    options = {"run_eagerly": strategy is None, **options}

    def make():
        inner = [keras.layers.Dense(units, "tanh") for units in hidden]
        model = keras.Sequential([keras.layers.Input((4,)), *inner, keras.layers.Dense(2)])
        model.compile(optimizer() if callable(optimizer) else optimizer, "mse", **options)
        return model

    if strategy is None:
        return make()
    with strategy.scope():
        return make()


def fit(model, data=None, **options):
    """By default on batches, as of arrays Keras traces functions that make them, anew in each call."""
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16) if data is None else data
    return model.fit(data, **{"epochs": 3, "shuffle": False, "verbose": 0, **options})


def assert_close(model, reference, rtol=1e-4):
    for mine, expected in zip(model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=rtol, atol=1e-5)


def links(model):
    return model.distribute_strategy.extended.links(model)


OPTIONS = {
    "adam": {"optimizer": "adam", "metrics": ["mae"]},
    "averages": {"optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.8)},
    "schedule": {"optimizer": lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.3, 9))},
    "loss scale": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))},
    "steps": {"optimizer": "adam", "steps_per_execution": 3},
    "eager": {"optimizer": "adam", "run_eagerly": True},
}
