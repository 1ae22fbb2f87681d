"""What the checks of this folder share: data, each process's share of them, a model, and comparisons.

Float64 throughout, so that what is left of a difference is not rounding.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist

FOLDER = sys.argv[1]
BATCH, STEPS, WORDS, CLASSES = 12, 5, 7, 3

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
keras.backend.set_floatx("float64")
generator = np.random.default_rng(0)
X = generator.integers(0, WORDS, (BATCH * STEPS, 4))
Y = generator.integers(0, CLASSES, BATCH * STEPS)


def share(rows):
    """This process's rows of each batch."""
    return rows.reshape(STEPS, BATCH, *rows.shape[1:])[:, rank::size].reshape(-1, *rows.shape[1:])


def make_model(optimizer, dtype=None, units=6, **compiling):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.layers.Input((4,), dtype="int32"),
            keras.layers.Embedding(WORDS, 5, dtype=dtype),
            keras.layers.Flatten(dtype=dtype),
            keras.layers.Dense(units, "tanh", dtype=dtype),
            keras.layers.Dense(CLASSES, dtype="float32" if dtype else None),
        ]
    )
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), **compiling)
    return model


def plain_model(optimizer, **compiling):
    """A reference: plain Keras, eagerly, as it would trace longer than it trains.

    Not where a graph computes other bits in float32: powers, of schedules and of Adam.
    """
    return make_model(optimizer, run_eagerly=True, **compiling)


def fit(model, x, y, **how):
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(len(x) // STEPS)  # Keras traces functions of arrays
    model.fit(data, **{"epochs": 2, "verbose": 0, **how})
    return model


def assert_equal(actual, expected, rtol=1e-9):
    for variable, reference in zip(actual.variables, expected.variables, strict=True):
        wanted = reference.numpy()
        np.testing.assert_allclose(
            variable.numpy(), wanted, rtol=0, atol=rtol * np.abs(wanted).max(), err_msg=variable.path
        )


def assert_alike(model):
    """On all ranks, to the last bit."""
    for variable in [*model.variables, *model.optimizer.variables]:
        value = tf.convert_to_tensor(variable.value)
        everyone = tfdist.all_gather(tf.reshape(tf.cast(value, tf.float64), [1, -1]))
        assert np.array_equal(everyone, np.repeat(everyone[:1], size, 0)), variable.path
