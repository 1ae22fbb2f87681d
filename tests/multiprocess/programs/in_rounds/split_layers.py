"""`AllReduceStrategy(mesh=…)` with split layers against plain Keras; a check for each name in TEST_CASES.

On two processes all layers are split over both; on four, over two pairs, whose parts are copies.
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
from tfdist.layers import ColumnParallelDense, ParallelEmbedding, RowParallelDense
from tfdist.strategies.divided import weight_rows

FOLDER = sys.argv[1]
ROWS, BATCH = 21, 8  # a last batch of 5 rows, of which one process of four gets 2 and the others 1

tfdist.init()
rank, size = tfdist.rank(), tfdist.size()
MESHES = {2: {"model": 2}, 3: {"model": 3}, 4: {"data": 2, "model": 2}}
generator = np.random.default_rng(0)
TOKENS, IMAGES, X, Y = (
    generator.integers(0, 12, (ROWS, 6)),
    generator.normal(size=(ROWS, 6, 6, 3)),
    generator.normal(size=(ROWS, 7)),
    generator.normal(size=(ROWS, 2)),
)
layers = keras.layers


class Plain:
    """Layers of Keras."""

    @staticmethod
    def columns(units, activation=None, gather_output=True, **how):
        return layers.Dense(units, activation, **how)

    @staticmethod
    def rows(units, activation=None, input_is_parallel=False, **how):
        return layers.Dense(units, activation, **how)

    embedding = layers.Embedding


class Split:
    """The same layers, split."""

    columns, rows, embedding = ColumnParallelDense, RowParallelDense, ParallelEmbedding


def strategy(**arguments):
    return tfdist.AllReduceStrategy(**{"devices": ["CPU:0"], "mesh": tfdist.Mesh(**MESHES[size]), **arguments})


def pair(of):
    """Between the layers of the pair, units stay on their processes."""
    return keras.Sequential(
        [
            layers.Input((7,)),
            of.columns(12, "tanh", gather_output=False, kernel_regularizer="l2"),
            layers.Activation("gelu"),
            of.rows(6, "tanh", input_is_parallel=True),
            of.columns(6, "softmax"),
            of.rows(2),
        ]
    )


def images(of):
    """Data-parallel convolutions, and split dense layers."""
    inputs = keras.Input((6, 6, 3))
    hidden = layers.Conv2D(4, 3, activation="relu")(inputs)
    hidden = layers.BatchNormalization(synchronized=of is Split)(hidden)
    return keras.Model(inputs, of.rows(2)(of.columns(12, "relu")(layers.Flatten()(hidden))))


def words(of):
    """An embedding that is read elsewhere, too, and masks within a pair."""
    inputs = keras.Input((6,), dtype="int64")
    embedding = of.embedding(12, 6, mask_zero=True, embeddings_regularizer="l2")
    hidden = of.columns(12, "tanh", gather_output=False)(embedding(inputs))
    hidden = layers.LSTM(6)(of.rows(6, input_is_parallel=True)(hidden))
    return keras.Model(inputs, layers.Dense(2)(Tied(embedding)(hidden)))


class Tied(layers.Layer):
    """Multiplies by the weight of an embedding."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def call(self, x):
        return tf.matmul(x, self.embedding.embeddings, transpose_b=True)


class Twice(keras.Model):
    """Calls a layer twice, and penalizes the gradient by its inputs."""

    def __init__(self, of):
        super().__init__()
        self.first, self.again, self.out = of.columns(6, "tanh"), of.rows(6, "tanh"), layers.Dense(2)

    def call(self, x):
        return self.out(self.again(self.again(self.first(x))))

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


def momentum():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def compiled(make, optimizer=momentum, made=None, **how):
    keras.utils.set_random_seed(1)
    with (made or tf.distribute.get_strategy()).scope():
        model = make(Split if made else Plain)
        model.compile(optimizer(), "mse", run_eagerly=made is None, **how)
    return model


def fit(model, x, epochs=2, **how):
    return model.fit(x, Y, **{"batch_size": BATCH, **how}, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def assert_as_plain(make, x, optimizer=momentum, made=None, **how):
    """Weights, losses and outputs are those of plain Keras."""
    model = compiled(make, optimizer, made or strategy())
    losses = fit(model, x, **how)
    outputs, weights = model.predict(x[:5], verbose=0), model.get_weights()
    assert any(weight_rows.of(weight) is not None for weight in model.weights)
    if rank == 0:
        plain = compiled(make, optimizer)
        np.testing.assert_allclose(losses, fit(plain, x, **how), rtol=1e-6)
        assert_close(weights, plain.get_weights())
        np.testing.assert_allclose(outputs, plain.predict(x[:5], verbose=0), rtol=1e-6)
    tfdist.barrier()
    return model


def models():
    made = strategy()
    for make, x in ((pair, X), (images, IMAGES), (words, TOKENS)):
        assert_as_plain(make, x, made=made)


def second_order():
    assert_as_plain(Twice, X)


def averages():
    return keras.optimizers.AdamW(
        0.01, weight_decay=0.1, global_clipnorm=0.1, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=3
    )


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=0.1), 256.0, 3)


def accumulated():
    return keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)


def optimizers():
    made = strategy()
    assert_as_plain(pair, X, averages, made)
    assert_as_plain(pair, X, scaled, made)


def accumulation():
    assert_as_plain(pair, X, accumulated, epochs=3)


def few():
    """Batches with fewer rows than processes."""
    model, plain = compiled(pair, made=strategy()), compiled(pair)
    for each in (model, plain):
        each.fit(X[:4], Y[:4], batch_size=1, shuffle=False, verbose=0)
    assert_close(model, plain.get_weights())


def sharded():
    """Other weights are divided among all processes, too."""
    for shard in ("optimizer", "weights"):
        assert_as_plain(pair, X, averages, strategy(shard=shard))


def ways():
    made = strategy()
    for how in ({"steps_per_execution": 2}, {"jit_compile": True}):
        model = compiled(pair, made=made, **how)
        fit(model, X)
        assert_close(model, trained())
    model = compiled(pair, made=made)
    model.compile(model.optimizer, "mse", run_eagerly=True)
    fit(model, X)
    assert_close(model, trained())


def trained():
    model = compiled(pair)
    fit(model, X)
    return model.get_weights()


def loops():
    """Steps of one's own, on shares of one's own."""
    made = strategy()
    model, plain = compiled(pair, made=made), compiled(pair)
    share = slice(rank, BATCH, size)

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - y) ** 2) / y.shape[1] / BATCH
            loss += sum(model.losses) / size
        model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    for run in (made.run, tf.function(made.run)):
        run(step, (tf.constant(X[share]), tf.constant(Y[share])))
    for _ in range(2):
        plain.train_on_batch(X[:BATCH], Y[:BATCH])
    assert_close(model, plain.get_weights())


def files():
    """Files are plain Keras's, both ways; training goes on, and stops early. A `.keras` file has split layers."""
    path = os.path.join(FOLDER, f"model-{size}.keras")
    made = strategy()
    model = compiled(pair, keras.optimizers.Adam, made)
    fit(model, X)
    model.save(path)
    model.save_weights(path.replace(".keras", ".weights.h5"))
    tfdist.barrier()
    alone, plain = keras.models.load_model(path), compiled(pair, keras.optimizers.Adam)
    with made.scope():
        loaded, other = keras.models.load_model(path), compiled(pair, keras.optimizers.Adam, made)
        other.optimizer.build(other.trainable_variables)
    plain.optimizer.build(plain.trainable_variables)
    for each in (plain, other):
        each.load_weights(path.replace(".keras", ".weights.h5"))
    for each in (model, loaded, alone, plain, other):
        fit(each, X, 1)
    weights = model.get_weights()
    for each in (loaded, alone, plain, other):
        assert_close(each, weights)
    best_parts_are_restored(model, plain, functools.partial(fit, x=X))


def restarted():
    def given():
        path = os.path.join(FOLDER, "best.keras")
        return [
            keras.callbacks.BackupAndRestore(os.path.join(FOLDER, "backup")),
            keras.callbacks.ModelCheckpoint(path, monitor="loss", save_best_only=True),
            keras.callbacks.EarlyStopping(monitor="loss", patience=1, restore_best_weights=True),
        ]

    with pytest.raises(KeyError, match="interrupted"):
        fit(compiled(pair, made=strategy()), X, 3, callbacks=[*given(), Interrupts(2)])
    tfdist.barrier()
    model = compiled(pair, made=strategy())
    fit(model, X, 3, callbacks=given())
    plain = compiled(pair)
    fit(plain, X, 3)
    assert_close(model, plain.get_weights())


def refused():
    with pytest.raises(ValueError, match=r"AllReduceStrategy: mesh=Mesh\(.*\) does not work with delay=1"):
        strategy(delay=1)
    with pytest.raises(TypeError, match=r"AllReduceStrategy\(mesh=…\) must be a tfdist.Mesh, .*; got 2"):
        strategy(mesh=2)
    with pytest.raises(ValueError, match=rf"is for 5 processes \(model=5\), and {size} train together"):
        strategy(mesh=tfdist.Mesh(model=5))
    with tfdist.AllReduceStrategy(devices=["CPU:0"]).scope(), pytest.raises(ValueError, match="strategy in use has no"):
        pair(Split)


def alone():
    """The chief alone calls a model."""
    model = compiled(pair, made=strategy())
    if rank == 0:
        model(X[:2])
    tfdist.barrier()


def endless():
    """Trains until it is killed."""
    model = compiled(pair, made=strategy())
    fit(model, X, 1)
    print("READY", flush=True)
    fit(model, X, 10**6)


run_checks(globals(), lambda: keras.backend.set_floatx("float64"))
tfdist.barrier()
