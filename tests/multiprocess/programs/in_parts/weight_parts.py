"""`AllReduceStrategy(shard="weights")` against plain Keras; a check for each name in TEST_CASES.

Weights of any size are cut here, also biases: all those with a row for each process.
"""

import os

import as_plain
import keras
import numpy as np
import pytest
import tensorflow as tf
from as_plain import FOLDER, IMAGES, TOKENS, X, accumulated, averages, compiled, fit, rank, scaled, size
from checking import run_checks
from comparing import assert_close

import tfdist
from tfdist import sharding
from tfdist.strategies.divided import weight_parts

sharding.SPLIT_BYTES = 0
layers = keras.layers
HOW = {"devices": ["CPU:0"], "shard": "weights"}


def strategy(**arguments):
    return tfdist.AllReduceStrategy(**HOW, **arguments)


class Twice(as_plain.Penalized):
    """Calls a layer three times, twice in a loop."""

    def __init__(self):
        super().__init__()
        self.first, self.looped, self.out = (
            layers.Dense(5, activation="tanh"),
            layers.Dense(5, activation="tanh"),
            layers.Dense(2),
        )

    def call(self, x):
        x = self.first(x)
        if not self.looped.built:
            self.looped.build(x.shape)
        _, x = tf.while_loop(lambda step, _: step < 2, lambda step, x: (step + 1, self.looped(x)), (0, x))
        return self.out(self.looped(x))


class Tied(layers.Layer):
    """Reads the weight of another layer, and its own twice, once in a conditional."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4), regularizer="l2")

    def call(self, x):
        x = tf.matmul(x, self.kernel)
        one = tf.ones([], x.dtype)
        scale = tf.cond(tf.reduce_mean(self.kernel) < 10, lambda: one + tf.reduce_sum(self.kernel), lambda: one)
        return tf.matmul(x * scale, self.embedding.embeddings, transpose_b=True)


def images():
    inputs = keras.Input((6, 6, 3))
    skip = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    hidden = layers.BatchNormalization(synchronized=True)(skip)
    hidden = layers.Add()([skip, layers.SpectralNormalization(layers.Conv2D(4, 3, padding="same"))(hidden)])
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling2D()(hidden)))


def words():
    inputs = keras.Input((6,), dtype="int64")
    embedding = layers.Embedding(12, 4, mask_zero=True, embeddings_regularizer="l2")
    hidden = layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True))(embedding(inputs))
    hidden = hidden + layers.MultiHeadAttention(2, 2, use_bias=False)(hidden, hidden)
    hidden = layers.LayerNormalization()(layers.TimeDistributed(layers.Dense(4))(hidden))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(Tied(embedding)(hidden))))


def dense():
    return keras.Sequential([layers.Input((7,)), layers.Dense(6, activation="tanh"), layers.Dense(6), layers.Dense(2)])


def classes():
    """The outputs of its last layer keep their logits, which a cross-entropy looks for."""
    return keras.Sequential([layers.Input((7,)), layers.Dense(6, activation="tanh"), layers.Dense(2, "softmax")])


def assert_as_plain(make, x, made, *arguments):
    """And no process has a weight whole that has rows for all."""
    model = as_plain.assert_as_plain(make, x, made, *arguments)
    for weight in model.trainable_weights:
        assert (weight_parts.of(weight) is None) == (weight.shape[0] < size), weight.path
        assert weight._value is None or weight.shape[0] < size, weight.path


def models():
    made = strategy()
    assert_as_plain(words, TOKENS, made)
    assert_as_plain(Twice, X, made)


def convolutions():
    assert_as_plain(images, IMAGES, strategy())


def optimizers(at_once="model", by_layer="layer"):
    """Weights are gathered at once for one, and layer by layer for the other."""
    assert_as_plain(dense, X, strategy(gather=at_once), averages, 3)
    assert_as_plain(classes, X, strategy(gather=by_layer), scaled, 3, "categorical_crossentropy")


def optimizers_exchanged():
    optimizers("layer", "model")


def accumulation():
    assert_as_plain(dense, X, strategy(), accumulated, 3)


def ways():
    as_plain.assert_as_plain_in_all_ways(strategy, dense)


def loops():
    """Steps of one's own with a compiled model within the step; a gradient outside of `Strategy.run`."""
    as_plain.assert_as_plain_in_loops(strategy, dense, tf.function)
    with strategy().scope():
        table = layers.Embedding(12, 1)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(table(TOKENS[rank::size]))
    (rows,) = tape.gradient(total, table.trainable_variables)
    occurrences = np.bincount(TOKENS.ravel(), minlength=12)
    np.testing.assert_array_equal(tf.squeeze(rows), np.array_split(occurrences, size)[rank])


def files():
    as_plain.assert_files_as_plain(strategy, dense)


def restarted():
    as_plain.assert_restarts_as_plain(strategy, dense)


def read():
    """All processes read whole weights, and assign to them; shapes are those of whole weights."""
    model = compiled(dense, made=strategy())
    changed = [value + 1 for value in model.get_weights()]
    model.set_weights(changed)
    assert_close(model, changed)
    kernel = model.layers[0].kernel
    kernel.assign_add(np.ones((7, 6)))
    np.testing.assert_allclose(kernel.numpy(), changed[0] + 1)
    assert kernel.shape == (7, 6)
    assert model.count_params() == 7 * 6 + 6 + 6 * 6 + 6 + 6 * 2 + 2
    np.testing.assert_allclose(model(X[:1]), model.predict(X[:1], verbose=0))


def refused():
    made = strategy()
    with pytest.raises(ValueError, match=r"the optimizer lamb may look at whole weights\. Use one of"):
        fit(compiled(dense, lambda: keras.optimizers.Lamb(0.1), made))
    with pytest.raises(ValueError, match=r"no process has all of the weight .*kernel"):
        compiled(dense, made=made).export(os.path.join(FOLDER, "exported"))


def alone():
    as_plain.call_alone(strategy, dense, keras.Model.get_weights)


def endless():
    as_plain.train_endlessly(strategy, dense)


def at_once(check):
    """The check with weights that are gathered for the whole model at once."""

    def checked():
        HOW["gather"] = "model"
        check()
        del HOW["gather"]

    return checked


AT_ONCE = {f"{check.__name__}_at_once": at_once(check) for check in (models, convolutions, ways, loops)}
run_checks({**globals(), **AT_ONCE}, lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
