"""What the cases of this folder share: the strategy, data, a model, and how a case is declared."""

import os

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")

DEVICES = int(os.environ.get("TEST_DEVICES", "1"))
if DEVICES > 1:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)

strategy = tfdist.AllReduceStrategy(
    devices=[f"CPU:{index}" for index in range(DEVICES)], algorithm=os.environ.get("TEST_ALGORITHM", "auto")
)
CASES = {}

digits = load_digits()
X = (digits.data / 16.0)[:203]
Y = digits.target[:203]


def case(function):
    CASES[function.__name__] = function
    return function


def spread(function):
    """Runs on three processes, or on two devices of each of two, and on two processes in sweeps only."""
    return case(function)


def mlp(optimizer="sgd", units=12, metrics=(), loss=None, layers=(), **compile_arguments):
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((64,)), keras.layers.Dense(units, activation="tanh"), *layers, keras.layers.Dense(10)]
        )
        model.compile(
            optimizer if not callable(optimizer) else optimizer(),
            loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=list(metrics),
            **compile_arguments,
        )
    return model


_shared = []


def shared_mlp():
    """The model of cases that differ in their data, as it began: so its steps are traced once for all of them."""
    if not _shared:
        model = mlp(metrics=["accuracy"])
        _shared.extend([model, model.get_weights()])
    model, weights = _shared
    model.set_weights(weights)
    model.optimizer.iterations.assign(0)
    return model


def numbers(model, history=None):
    results = {"weights": [np.asarray(w, np.float64).ravel().tolist() for w in model.get_weights()]}
    if history is not None:
        results["history"] = history.history
    return results


def trained(model, *data, **arguments):
    """The weights after `fit`, and its logs."""
    settings = {"epochs": 2, "shuffle": False, "verbose": 0, **arguments}
    return numbers(model, model.fit(*data, **settings))


def fitted(model, x=X, y=Y, *weights, **arguments):
    """What is `trained` on a dataset: of arrays Keras traces functions in each `fit`."""
    return trained(model, batched(x, tuple(y) if isinstance(y, list) else y, *weights), **arguments)


def fitted_on_arrays(model, x=X, y=Y, **arguments):
    return trained(model, x, y, **{"batch_size": 32, **arguments})


def batched(*arrays, size=32):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)
