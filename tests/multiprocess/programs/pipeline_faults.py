"""What goes wrong with pipelines, one after another, as TEST_DO says: a list of functions below, with commas between.

Every rank prints what was raised. TEST_RANK: the rank that does otherwise than the others.
"""

import os

import keras
import numpy as np
import tensorflow as tf

import tfdist

RANK = int(os.environ.get("TEST_RANK", "1"))
strategy = tfdist.PipelineStrategy(stages=int(os.environ.get("TEST_STAGES", "2")), micro_batches=2)
deviates = strategy.rank == RANK


def made():
    with strategy.scope():
        hidden = [keras.layers.Dense(8, "tanh") for _ in range(4)]
        model = keras.Sequential([keras.Input((6,)), *hidden])
        model.compile("sgd", "mse")
    return model


def fit(data, **options):
    keras.utils.set_random_seed(0)
    made().fit(data, verbose=0, **options)


def dataset(rows=40, scale=1.0):
    values = scale * np.random.default_rng(0).normal(size=(rows, 6)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((values, values[:, :1] * np.ones([1, 8], "float32")))


def weightless():
    other = tfdist.PipelineStrategy(stages=2, micro_batches=2, cuts=["last"])
    with other.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.ReLU(name="last")])
        model.compile("sgd", "mse")
    model.fit(dataset().batch(8), verbose=0)


class OwnClipping(keras.optimizers.SGD):
    def _clip_gradients(self, grads):
        return grads


def own_clipping():
    other = tfdist.PipelineStrategy(stages=2, micro_batches=2, cuts=["last"])
    with other.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(8, name="last")])
        model.compile(OwnClipping(), "mse")
    model.fit(dataset().batch(8), verbose=0)


def other_values():
    fit(dataset(scale=2.0 if deviates else 1.0).batch(8))


def other_sizes():
    fit(dataset(42).batch(7 if deviates else 8))  # six batches of both


def unseeded():
    data = dataset()
    tf.random.set_seed(None)
    made().fit(data.shuffle(40).batch(8), verbose=0)


def of_unknown_length(rows):
    return dataset(rows).batch(8).filter(lambda x, y: True)


def longer():
    fit(of_unknown_length(64 if deviates else 40))


def shorter_validation():
    fit(dataset().batch(8), validation_data=of_unknown_length(16 if deviates else 40))


def longer_as_is_known():
    fit(dataset(64 if deviates else 40).batch(8))


def raising():
    class Raising(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if deviates and batch == 2:
                raise ValueError("boom")

    fit(dataset().batch(8), callbacks=[Raising()])


def alone():
    """The chief alone saves, while the other goes on to train."""
    model = made()
    if not deviates:
        model.save_weights("nowhere/alone.weights.h5")  # which nobody writes
    model.fit(dataset().batch(8), verbose=0)


def endless():
    class Saying(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 20:
                print("READY", flush=True)

    fit(dataset().repeat().batch(8), steps_per_epoch=100_000, callbacks=[Saying()])


for name in os.environ["TEST_DO"].split(","):
    print("DO", name, flush=True)
    try:
        globals()[name]()
    except (tfdist.TfdistError, ValueError) as error:
        print("ERROR", name, type(error).__name__, error, flush=True)
        if isinstance(error, tfdist.PeerLostError) or name == "raising":
            raise
    else:
        print("PASSED", name, flush=True)
print("DONE", flush=True)
