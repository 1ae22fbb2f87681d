"""`AllReduceStrategy(shard="weights")` against plain Keras; a check for each name in TEST_CASES.

Weights of any size are cut here, also biases: all those with a row for each process.
"""

import functools
import os
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from common import assert_close, best_parts_are_restored
from interrupting import Interrupts

import tfdist
from tfdist import sharding
from tfdist.strategies.divided import weight_rows

FOLDER = sys.argv[1]
ROWS, BATCH = 22, 8  # a last batch of 6 rows
sharding.SPLIT_BYTES = 0

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
generator = np.random.default_rng(0)
TOKENS, IMAGES, X, Y = (
    generator.integers(0, 12, (ROWS, 6)),
    generator.normal(size=(ROWS, 6, 6, 3)),
    generator.normal(size=(ROWS, 7)),
    generator.normal(size=(ROWS, 2)),
)
layers = keras.layers


HOW = {"devices": ["CPU:0"], "shard": "weights"}


def strategy(**arguments):
    return tfdist.AllReduceStrategy(**HOW, **arguments)


class Twice(keras.Model):
    """Calls a layer three times, twice in a loop, and penalizes the gradient by its inputs."""

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

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                outputs = self(x, training=True)
            penalty = tf.reduce_mean(tf.reduce_sum(inner.gradient(outputs, x) ** 2, 1))
            loss = self.compute_loss(x=x, y=y, y_pred=outputs) + penalty
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


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
    hidden = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(embedding(inputs))
    hidden = hidden + layers.MultiHeadAttention(2, 2, use_bias=False)(hidden, hidden)
    hidden = layers.LayerNormalization()(layers.TimeDistributed(layers.Dense(4))(hidden))
    return keras.Model(inputs, layers.Dense(2)(layers.Flatten()(Tied(embedding)(hidden))))


def dense():
    return keras.Sequential([layers.Input((7,)), layers.Dense(6, activation="tanh"), layers.Dense(6), layers.Dense(2)])


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def classes():
    """The outputs of its last layer keep their logits, which a cross-entropy looks for."""
    return keras.Sequential([layers.Input((7,)), layers.Dense(6, activation="tanh"), layers.Dense(2, "softmax")])


def compiled(make, optimizer=momentum, made=None, loss="mse", **how):
    keras.utils.set_random_seed(1)
    with (made or tf.distribute.get_strategy()).scope():
        model = make()
        model.compile(optimizer(), loss, run_eagerly=made is None, **how)
    return model


def fit(model, x, epochs=2, **how):
    return model.fit(x, Y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **how).history["loss"]


def assert_as_plain(make, x, optimizer=momentum, epochs=2, made=None, loss="mse", **how):
    """Weights, losses and outputs are those of plain Keras, and no process has a weight whole that has rows for all."""
    model = compiled(make, optimizer, made or strategy(), loss, **how)
    losses = fit(model, x, epochs)
    outputs, weights = model.predict(x[:5], verbose=0), model.get_weights()
    for weight in model.trainable_weights:
        assert (weight_rows.of(weight) is None) == (weight.shape[0] < size), weight.path
        assert weight._value is None or weight.shape[0] < size, weight.path
    if rank == 0:
        plain = compiled(make, optimizer, loss=loss)
        np.testing.assert_allclose(losses, fit(plain, x, epochs), rtol=1e-6)
        assert_close(weights, plain.get_weights())
        np.testing.assert_allclose(outputs, plain.predict(x[:5], verbose=0), rtol=1e-6)
    tfdist.barrier()
    return model


def models():
    made = strategy()
    assert_as_plain(words, TOKENS, made=made)
    assert_as_plain(Twice, X, made=made)


def convolutions():
    assert_as_plain(images, IMAGES)


def averages():
    return keras.optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    )


def scaled():
    """The norm of each whole gradient is clipped, too."""
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), 256.0, 3)


def optimizers(at_once="model", by_layer="layer"):
    """Weights are gathered at once for one, and layer by layer for the other."""
    assert_as_plain(dense, X, averages, 3, strategy(gather=at_once))
    assert_as_plain(classes, X, scaled, 3, strategy(gather=by_layer), "categorical_crossentropy")


def optimizers_exchanged():
    optimizers("layer", "model")


def accumulated():
    assert_as_plain(dense, X, lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1), 3)


def ways():
    made = strategy()
    for how in ({"steps_per_execution": 2}, {"jit_compile": True}):
        assert_as_plain(dense, X, made=made, **how)
    model = compiled(dense, made=made)
    model.compile(model.optimizer, "mse", run_eagerly=True)
    fit(model, X)
    weights = model.get_weights()
    assert_close(compiled_and_trained(), weights)


def compiled_and_trained():
    model = compiled(dense)
    fit(model, X)
    return model.get_weights()


def loops():
    """Steps of one's own, also with a compiled model within the step; a gradient outside of `Strategy.run`."""
    made = strategy()
    model, plain = compiled(dense, made=made), compiled(dense)
    share = slice(rank, BATCH, size)
    forward = tf.function(lambda x: model(x, training=True))

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((forward(x) - y) ** 2) / y.shape[1] / BATCH
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for run in (made.run, tf.function(made.run)):
        run(step, (tf.constant(X[share]), tf.constant(Y[share])))
    for _ in range(2):
        plain.train_on_batch(X[:BATCH], Y[:BATCH])
    assert_close(model, plain.get_weights())
    with made.scope():
        table = layers.Embedding(12, 1)
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(table(TOKENS[rank::size]))
    (rows,) = tape.gradient(total, table.trainable_variables)
    occurrences = np.bincount(TOKENS.ravel(), minlength=12)
    np.testing.assert_array_equal(tf.squeeze(rows), np.array_split(occurrences, size)[rank])


def files():
    """Files are plain Keras's, both ways, also on another number of processes; training goes on, and stops early."""
    path = os.path.join(FOLDER, f"model-{size}.keras")
    made = strategy()
    model = compiled(dense, keras.optimizers.Adam, made)
    fit(model, X)
    model.save(path)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    tfdist.barrier()
    plain = keras.models.load_model(path)
    with made.scope():
        loaded, other = keras.models.load_model(path), compiled(dense, keras.optimizers.Adam, made)
    with made.scope():
        other.optimizer.build(other.trainable_variables)
    other.load_weights(path.replace(".keras", ".weights.h5"))
    for trained in (model, loaded, plain):
        fit(trained, X, 1)
    weights = model.get_weights()
    assert_close(loaded, weights)
    assert_close(plain, weights)
    fit(other, X, 1)
    assert_close(other, weights)
    best_parts_are_restored(model, plain, functools.partial(fit, x=X))


def restarted():
    def given():
        path = os.path.join(FOLDER, "best.keras")
        return [
            keras.callbacks.BackupAndRestore(os.path.join(FOLDER, "backup")),
            keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True),
            keras.callbacks.TensorBoard(os.path.join(FOLDER, "board"), histogram_freq=1),
            keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True),
        ]

    with pytest.raises(KeyError, match="interrupted"):
        fit(compiled(dense, made=strategy()), X, 3, callbacks=[*given(), Interrupts(2)])
    tfdist.barrier()
    model = compiled(dense, made=strategy())
    fit(model, X, 3, callbacks=given())
    weights = model.get_weights()
    if rank == 0:
        plain = compiled(dense)
        fit(plain, X, 3)
        assert_close(weights, plain.get_weights())
    tfdist.barrier()


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
        fit(compiled(dense, lambda: keras.optimizers.Lamb(0.1), made), X)
    with pytest.raises(ValueError, match=r"no process has all of the weight .*kernel"):
        compiled(dense, made=made).export(os.path.join(FOLDER, "exported"))


def alone():
    """The chief alone reads a weight."""
    model = compiled(dense, made=strategy())
    if rank == 0:
        model.get_weights()
    tfdist.barrier()


def endless():
    """Trains until it is killed."""
    model = compiled(dense, made=strategy())
    fit(model, X, 1)
    print("READY", flush=True)
    fit(model, X, 10**6)


def at_once(check):
    """The check with weights that are gathered for the whole model at once."""

    def checked():
        HOW["gather"] = "model"
        check()
        del HOW["gather"]

    return checked


AT_ONCE = {f"{check.__name__}_at_once": at_once(check) for check in (models, ways, loops)}
run_checks({**globals(), **AT_ONCE}, lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
