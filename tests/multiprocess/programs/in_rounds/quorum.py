"""`QuorumStrategy` against NumPy, and with what Keras has; a check for each name in TEST_CASES.

Prints a hash of the weights and of what else is to be the same on all processes, for each check.
"""

import itertools
import json
import os
import sys
import time
import zlib
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from checking import run_checks
from common import batched, dealt, gradient, in_sweeps
from comparing import assert_close
from interrupting import Interrupts
from own_steps import Gan, stepping

import tfdist
from tfdist.local_sgd import Averaging, Outer

keras.config.set_floatx("float64")
FOLDER = sys.argv[1]
ROWS, STEPS, EPOCHS, EVERY = 30, 5, 3, 2
RATE = 1 / 16

generator = np.random.default_rng(0)
X = generator.normal(size=(ROWS, 5))
Y = X @ generator.normal(size=(5, 3)) + 0.1 * generator.normal(size=(ROWS, 3))
START = [generator.normal(size=(5, 3)), generator.normal(size=3)]
hashes = {}


def strategy(**arguments):
    return tfdist.QuorumStrategy(**{"sync_every": EVERY, "quorum": size, "grace": 60.0, **arguments})


def note(name, *models):
    """Hashes the weights of models, which all processes must have alike."""
    everything = [weight.numpy() for model in models for weight in model.weights]
    hashes.setdefault(name, []).append(
        zlib.crc32(b"".join(np.ascontiguousarray(weight).tobytes() for weight in everything))
    )


def linear(made, optimizer=None, **compiling):
    with made.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(3)])
        model.compile(optimizer() if optimizer else keras.optimizers.SGD(RATE), "mse", **compiling)
    model.set_weights(START)
    return model


def batches(process):
    """Rows of a process, whose batches are of a size of their own."""
    rows = 2 + process
    return [slice(rows * step, rows * (step + 1)) for step in range(STEPS)]


def data(process):
    chosen = np.concatenate([np.arange(ROWS)[rows] for rows in batches(process)])
    return X[chosen], Y[chosen]


def await_file(path):
    while not path.exists():
        time.sleep(0.01)


def fit(model, epochs=EPOCHS, **how):
    return model.fit(batched(*data(rank), 2 + rank), epochs=epochs, verbose=0, **how).history


def reference(outer):
    """Rounds of two, two and one steps, the last one of which ends an epoch."""
    centre, velocity = [weight.copy() for weight in START], [np.zeros_like(weight) for weight in START]
    for _ in range(EPOCHS):
        for first in range(0, STEPS, EVERY):
            means = [np.zeros_like(weight) for weight in START]
            counts = [(2 + process) * len(batches(process)[first : first + EVERY]) for process in range(size)]
            for process in range(size):
                weights = [weight.copy() for weight in centre]
                for rows in batches(process)[first : first + EVERY]:
                    gradients = gradient(weights, X[rows], Y[rows])
                    weights = [w - RATE * g for w, g in zip(weights, gradients, strict=True)]
                for place, (w, c) in enumerate(zip(weights, centre, strict=True)):
                    means[place] += counts[process] / sum(counts) * (w - c)
            if outer:
                velocity = [0.875 * v + 0.75 * mean for v, mean in zip(velocity, means, strict=True)]
                centre = [c + 0.875 * v + 0.75 * mean for c, v, mean in zip(centre, velocity, means, strict=True)]
            else:
                centre = [c + mean for c, mean in zip(centre, means, strict=True)]
    return centre


def golden():
    outers = None, keras.optimizers.SGD(0.75, momentum=0.875, nesterov=True)
    ways = {}, {"run_eagerly": True}, {"steps_per_execution": 2}
    for outer, way in dealt(itertools.product(outers, ways), size, 2):
        model = linear(strategy(rule=Averaging() if outer is None else Outer(outer)), **way)
        fit(model)
        assert_close(model, reference(outer))
        note("golden", model)


def features():
    """Ranks end with equal weights, validation is of common ones, and training works."""
    optimizers = (
        lambda: keras.optimizers.SGD(0.02, use_ema=True, ema_momentum=0.5),
        lambda: keras.optimizers.Adam(0.02),
        lambda: keras.optimizers.Adam(0.02, gradient_accumulation_steps=2),
        lambda: keras.optimizers.AdamW(0.02, weight_decay=0.01, clipnorm=1.0),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.02)),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.05, 50)),
    )
    for optimizer in dealt(optimizers, 0, 4):
        model = linear(strategy(), optimizer=optimizer, metrics=["mae"])
        history = fit(model, epochs=6, validation_data=batched(X, Y, 32))
        assert history["loss"][-1] < history["loss"][0]
        note("features", model)
        if not getattr(model.optimizer, "use_ema", False):  # the averages are the weights from the end of `fit` on
            expected = np.mean((model.predict(batched(X, Y, 32), verbose=0) - Y) ** 2)
            np.testing.assert_allclose(history["val_loss"][-1], expected)
        hashes["features"].append([round(value, 9) for value in history["val_loss"]])


def layers():
    """Statistics, random numbers, regularization, and saving by the chief."""
    made = strategy(rule=Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)))
    with made.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((5,)),
                keras.layers.Dense(8, kernel_regularizer="l2"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2),
                keras.layers.Dense(3),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse")
    path = os.path.join(FOLDER, "model.keras")
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)])
    hashes.setdefault("layers", []).append(
        [zlib.crc32(weight.numpy().tobytes()) for weight in model.weights if "seed" not in weight.path]
    )
    if rank == 0:
        for weight, other in zip(keras.models.load_model(path).get_weights(), model.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, other)


def compressed():
    for method in (tfdist.compression.TopK(0.2), *in_sweeps(tfdist.compression.Int8())):
        made = strategy(compression=method, rule=Outer(keras.optimizers.SGD(0.7, momentum=0.5)))
        with made.scope():
            model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(600), keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(0.001), "mse")
        before = made.communication()["bytes"]
        history = fit(model, epochs=6)
        assert history["loss"][-1] < history["loss"][0]
        sent, whole = (
            made.communication()["bytes"] - before,
            18 * sum(weight.numpy().nbytes for weight in model.weights),
        )
        assert size == 1 or sent < whole * (0.6 if size < 3 else 1.2), (sent, whole)
        note("compressed", model)


def loops():
    made = strategy()
    with made.scope():
        gan = Gan()
        gan.build((None, 5))
        gan.compile(keras.optimizers.SGD(0.01, momentum=0.9), keras.optimizers.SGD(0.01, momentum=0.9))
    gan.fit(tf.data.Dataset.from_tensor_slices(data(rank)[0]).batch(2 + rank), epochs=2, verbose=0)
    note("loops", gan)
    model = linear(made := strategy())
    step = stepping(made, model)
    for _ in range(3):
        step(tf.constant(X[rank : 8 + rank] / 3), tf.constant(Y[rank : 8 + rank] / 3))
    made.settle(model)
    note("loops", model)
    step(tf.constant(X[rank : 8 + rank] / 3), tf.constant(Y[rank : 8 + rank] / 3))
    model.evaluate(batched(X, Y, 32), verbose=0)
    note("loops", model)


def again():
    """Further calls of fit, an interrupted one, weights that are set, another optimizer."""
    model = linear(strategy())
    fit(model, epochs=1)
    with pytest.raises(KeyError, match="interrupted"):
        fit(model, callbacks=[Interrupts(1)])
    fit(model, epochs=1)
    note("again", model)
    model.set_weights(START)
    fit(model)
    assert_close(model, reference(None))
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.Adam(0.01), "mse")
    fit(model, epochs=2)
    note("again", model)


def restarted():
    """All go on with the chief's backup, as if they had not ended; the outer optimizer too."""
    place = os.path.join(FOLDER, f"backup-{size}")
    outer = keras.optimizers.SGD(0.75, momentum=0.875, nesterov=True)
    with pytest.raises(KeyError, match="interrupted"):
        fit(linear(strategy(rule=Outer(outer))), callbacks=[keras.callbacks.BackupAndRestore(place), Interrupts(2)])
    again = linear(strategy(rule=Outer(outer)))
    assert len(fit(again, callbacks=[keras.callbacks.BackupAndRestore(place)])["loss"]) == 1
    assert_close(again, reference(outer))
    note("restarted", again)


def loading():
    """What the chief loads is for all."""
    made = strategy(rule=Outer(keras.optimizers.SGD(0.75, momentum=0.5)))
    with made.scope():
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        model.compile(keras.optimizers.Adam(0.02), "mse")
    path = os.path.join(FOLDER, "kept.weights.h5")
    fit(model, epochs=1)
    model.save_weights(path)
    kept = model.get_weights()
    fit(model, epochs=1)
    model.load_weights(path)
    for weight, other in zip(kept, model.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
    assert rank or int(model.optimizer.iterations) == STEPS, (
        "others may get it from steps that the chief has taken since"
    )
    fit(model, epochs=1)
    note("loading", model)


class Tells(keras.callbacks.Callback):
    """Writes a file when the first epoch has begun."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_begin(self, epoch, logs=None):
        self.path.touch()


def schedules():
    """Rates that callbacks set relative to the one before are equal on all processes, also where one begins first."""
    for inputs in ([keras.layers.Input((5,))], []):
        with strategy().scope():
            model = keras.Sequential([*inputs, keras.layers.Dense(3)])
            model.compile(keras.optimizers.SGD(RATE), "mse")
        halves = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 * rate)
        begun = Path(FOLDER, f"begun-{size}-{len(inputs)}")
        if rank:
            await_file(begun)
        history = fit(model, callbacks=[halves, Tells(begun)])
        assert history["learning_rate"] == [RATE / 2, RATE / 4, RATE / 8], history
        note("schedules", model)


def slow_end():
    """A process gets what others make of a last round while it is slow to end `fit`."""
    model = linear(strategy(quorum=1, grace=0.5))
    settled, ended = Path(FOLDER, "settled"), Path(FOLDER, "ended")

    class Slow(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if rank and batch == STEPS - 2:
                await_file(settled)

        def on_epoch_end(self, epoch, logs=None):
            (ended if rank else settled).touch()
            await_file(ended)

    fit(model, epochs=1, callbacks=[Slow()])
    note("slow_end", model)


def uneven():
    """An epoch ends for all when it ends for one, also where it ends with a round."""

    class Counts(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.seen = []

        def on_train_batch_end(self, batch, logs=None):
            self.batches = batch + 1

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(self.batches)
            note("uneven", self.model)

    for steps, others in ((5, 6), (6, 8)):
        model, counts = linear(strategy(grace=60.0)), Counts()
        rows = slice(0, 2 * (9 if rank else steps))
        x, y = np.concatenate([X] * 3)[rows], np.concatenate([Y] * 3)[rows]
        model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[counts])
        note("uneven", model)
        assert counts.seen == [others if rank else steps] * 3, counts.seen


first = tfdist.QuorumStrategy()  # enters the job
rank, size = first.rank, first.size
run_checks(globals(), lambda: keras.backend.set_floatx("float64"), lambda name: json.dumps(hashes.get(name)))
