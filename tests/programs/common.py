"""What the programs share: which strategy they run under, and the few lines that make runs comparable.

With ``TEST_PLAIN=1`` a program is plain Keras: its strategy is TensorFlow's default one, which does nothing. With
``TEST_SERVERS=1`` it trains on parameter servers, and with ``TEST_SHARD=optimizer`` optimizers are divided.
"""

import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

PLAIN = os.environ.get("TEST_PLAIN") == "1"
SHARD = os.environ.get("TEST_SHARD")


def strategy():
    """Begins a program: a fixed seed, float64, and the strategy under test."""
    keras.backend.clear_session()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(7)
    if PLAIN:
        return tf.distribute.get_strategy()
    import tfdist

    if os.environ.get("TEST_SERVERS") == "1":
        return tfdist.ParameterServerStrategy()
    return tfdist.AllReduceStrategy(shard=SHARD)


def folder(name):
    """A directory for a program's files, the same on every rank, as on a shared file system."""
    path = Path(os.environ.get("TEST_FOLDER", "/tmp/tfdist-programs")) / name
    path.mkdir(parents=True, exist_ok=True)
    return path


def digits(count):
    """The first of scikit-learn's scanned digits: images of (8, 8, 1) between 0 and 1, and labels."""
    dataset = load_digits()
    return (dataset.images[:count] / 16.0)[..., None], dataset.target[:count]


def batched(*arrays, size):
    """A dataset, for `fit` and `evaluate`: of arrays Keras traces functions in each call."""
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def weights(model):
    return [np.asarray(weight) for weight in model.get_weights()]


def change(model, before):
    """How far training moved the weights: shows a gradient of the wrong length where equality cannot be asked for."""
    return [after - was for after, was in zip(weights(model), before, strict=True)]


class Logs(keras.callbacks.Callback):
    """Keeps the logs that callbacks see at the end of each epoch and of each validation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append({name: float(value) for name, value in logs.items()})

    def on_test_end(self, logs=None):
        self.seen.append({name: float(value) for name, value in (logs or {}).items()})
