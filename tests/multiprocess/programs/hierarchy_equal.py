"""A server on each host, synchronous on both levels, against one process with the global batch; unequal shares.

Each case is trained by plain Keras first, in the same process, and eagerly, as it would trace longer than it trains.
See `tests/multiprocess/test_hierarchy.py`.
"""

import json
import os

import keras
import numpy as np

from tfdist.parameter_server import PerHost, Synchronous
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

strategy = ParameterServerStrategy(synchronization=Synchronous(), servers=PerHost(Synchronous()))
task = json.loads(os.environ["TF_CONFIG"])["task"]
worker = 0 if task["type"] == "chief" else 1 + task["index"]
generator = np.random.default_rng(0)
X = generator.normal(size=(48, 6)).astype("float32")
Y = np.stack([np.sin(X[:, 0]), X[:, 1] * X[:, 2]], 1).astype("float32")
WORDS = generator.integers(0, 50, size=(48, 5))
GLOBAL, OWN = 8, (4, 1, 3)


def own_rows(array):
    """Returns this worker's rows of each global batch."""
    begin = sum(OWN[:worker])
    return np.concatenate([array[batch + begin : batch + begin + OWN[worker]] for batch in range(0, 48, GLOBAL)])


def dense(optimizer):
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(30, "tanh"), keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


def embedded(optimizer):
    layers = [keras.layers.Input((5,)), keras.layers.Embedding(50, 8), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([*layers, keras.layers.Dense(2)])
    model.compile(optimizer, "mse")
    return model


CASES = {
    "clipped, averages": (
        lambda: dense(keras.optimizers.Adam(0.01, global_clipnorm=0.1, use_ema=True, ema_momentum=0.7)),
        X,
    ),
    "sparse": (lambda: embedded(keras.optimizers.Adagrad(0.1)), WORDS),
}


class Slower(keras.callbacks.Callback):
    """The chief halves the learning rate."""

    def on_epoch_begin(self, epoch, logs=None):
        if worker == 0 and epoch:
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)


def train(make, x, y, batch_size, callback, run_eagerly=False):
    keras.utils.set_random_seed(7)
    model = make()
    model.run_eagerly = run_eagerly
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0)
    return model


class HalvesAlone(Slower):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch:
            self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)


results = {}
for name, (make, x) in CASES.items():
    plain = train(make, x, Y, GLOBAL, HalvesAlone(), run_eagerly=True)
    expected = [weight.astype("float64") for weight in plain.get_weights()]
    with strategy.scope():
        model = train(make, own_rows(x), own_rows(Y), OWN[worker], Slower())
    weights = model.get_weights()
    results[name] = {
        "error": max(float(np.max(np.abs(actual - other))) for actual, other in zip(weights, expected, strict=True)),
        "iterations": int(model.optimizer._iterations),
        "sum": float(sum(np.sum(weight, dtype="float64") for weight in weights)),
    }
print("RESULT", json.dumps(results), flush=True)
