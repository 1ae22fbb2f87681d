"""Synchronous steps on parameter servers against one process with the global batch; two workers, unequal shares.

Each case is trained by plain Keras first, in the same process, and eagerly, as it would trace longer than it trains.
The second worker computes on a device of its own, which stands in for a GPU. See
`tests/multiprocess/test_parameter_server.py`.
"""

import functools
import json
import os
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.parameter_server.options.synchronization import Synchronous
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
device = ("CPU:0", "CPU:1")[worker]
strategy = ParameterServerStrategy(synchronization=Synchronous(), device=device)
generator = np.random.default_rng(0)
X = generator.normal(size=(48, 6)).astype("float32")
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], 1).astype("float32")
WORDS = generator.integers(0, 2000, size=(48, 5))
GLOBAL, OWN = 8, (5, 3)


def own_rows(array):
    """Returns this worker's rows of each global batch."""
    begin = sum(OWN[:worker])
    return np.concatenate([array[batch + begin : batch + begin + OWN[worker]] for batch in range(0, 48, GLOBAL)])


def dense(optimizer, **options):
    def make():
        layers = [
            keras.layers.Input((6,)),
            keras.layers.Dense(300, "tanh"),
            keras.layers.Dense(300),
            keras.layers.Dense(2),
        ]
        model = keras.Sequential(layers)
        model.compile(optimizer(), "mse", **options)
        return model

    return make, X, Y


def embedded(optimizer):
    def make():
        layers = [keras.layers.Input((5,)), keras.layers.Embedding(2000, 64), keras.layers.GlobalAveragePooling1D()]
        model = keras.Sequential([*layers, keras.layers.Dense(2)])
        model.compile(optimizer(), "mse")
        return model

    return make, WORDS, Y


def constrained():
    options = {"kernel_constraint": "non_neg", "bias_constraint": keras.constraints.MaxNorm(0.1)}
    layers = [keras.layers.Input((6,)), keras.layers.Dense(20, "tanh", **options), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def reduced(reduction):
    def make():
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction=reduction))
        return model

    return make, X, Y


def schedule():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9)


def undecayed():
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


CASES = {
    "sgd": dense(lambda: keras.optimizers.SGD(0.1)),
    "momentum": dense(lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True)),
    "adam": dense(lambda: keras.optimizers.Adam(0.01)),
    "adamw": dense(undecayed),
    "clipnorm": dense(lambda: keras.optimizers.SGD(0.1, clipnorm=0.1)),
    "clipvalue": dense(lambda: keras.optimizers.SGD(0.1, clipvalue=0.01)),
    "schedule": dense(schedule),
    "averages": dense(lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)),
    "accumulation": dense(lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)),
    "steps": dense(lambda: keras.optimizers.RMSprop(0.01), steps_per_execution=2),
    "lamb": dense(lambda: keras.optimizers.Lamb(0.01)),
    "sparse adagrad": embedded(lambda: keras.optimizers.Adagrad(0.1)),
    "sparse sgd": embedded(lambda: keras.optimizers.SGD(0.1)),
    "sparse rmsprop": embedded(lambda: keras.optimizers.RMSprop(0.01)),
    "assigned": dense(lambda: keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.7)),
    "constraints": (constrained, X, Y),
    "mean": reduced("sum_over_batch_size"),
}

ASSIGNED = [CASES["assigned"][0]]


def train(make, x, y, batch_size, run_eagerly=False):
    keras.utils.set_random_seed(7)
    model = make()
    model.run_eagerly = run_eagerly
    if make in ASSIGNED:
        fit_twice(model, x, y, batch_size, is_plain=run_eagerly)
    else:
        model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model


def fit_twice(model, x, y, batch_size, is_plain):
    """Assigns between two calls of `fit`; the chief begins the second one when the other worker has begun it."""
    begun = Path(os.environ["TEST_FOLDER"]) / "begun"
    tell = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.touch())
    fit = functools.partial(model.fit, x, y, batch_size=batch_size, shuffle=False, verbose=0)
    fit()
    model.set_weights([weight / 2 for weight in model.get_weights()])
    while not is_plain and worker == 0 and not begun.exists():
        time.sleep(0.01)
    fit(callbacks=[tell] if worker and not is_plain else [])


results = {}
for name in os.environ["TEST_CASES"].split(","):
    make, x, y = CASES[name]
    expected = [weight.astype("float64") for weight in train(make, x, y, GLOBAL, run_eagerly=True).get_weights()]
    with strategy.scope():
        model = train(make, own_rows(x), own_rows(y), OWN[worker])
    weights = model.get_weights()
    results[name] = {
        "error": max(float(np.max(np.abs(actual - other))) for actual, other in zip(weights, expected, strict=True)),
        "iterations": int(model.optimizer._iterations),
        "is_there": all(weight.value.device.endswith(device) for weight in model.weights),
        "sum": float(sum(np.sum(weight, dtype="float64") for weight in weights)),
    }
print("RESULT", json.dumps(results), flush=True)
