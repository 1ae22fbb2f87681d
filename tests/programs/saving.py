"""Saving and loading in all formats: a model, a subclass, weights, an export, a checkpoint; then training goes on."""

import keras
import numpy as np
import tensorflow as tf
from common import PLAIN, SHARD, batched, digits, folder, strategy, weights
from keras import layers

scope = strategy()
images, labels = digits(48)
place = folder("saving")


@keras.saving.register_keras_serializable()
class Residual(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, inputs):
        return inputs + self.dense(inputs)

    def get_config(self):
        return {**super().get_config(), "units": self.units}


def fit(model):
    return model.fit(batched(images, labels, size=24), epochs=1, verbose=0).history["loss"]


def build():
    inputs = keras.Input((8, 8, 1))
    model = keras.Model(inputs, layers.Dense(10)(Residual(64)(layers.Flatten()(inputs))))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def checkpoint(model):
    """A checkpoint of a model; of its layers only if each process has a part of the optimizer's variables."""
    return tf.train.Checkpoint(layers=model.layers) if SHARD else tf.train.Checkpoint(model=model)


with scope.scope():
    model = build()
fit(model)

model.save(place / "model.keras")
model.save(place / "model.h5")
model.save_weights(place / "model.weights.h5")
model.export(place / "exported", verbose=False)
checkpoint(model).write(str(place / f"ckpt-{0 if PLAIN else scope.rank}"))

with scope.scope():
    whole = keras.models.load_model(place / "model.keras")
    old = keras.models.load_model(place / "model.h5")
    bare = build()
    bare.load_weights(place / "model.weights.h5")
    restored = build()
    checkpoint(restored).read(str(place / f"ckpt-{0 if PLAIN else scope.rank}"))
served = tf.saved_model.load(str(place / "exported"))

results = {
    "weights": weights(model),
    "equal": [
        all(np.array_equal(a, b) for a, b in zip(weights(model), weights(other), strict=True))
        for other in (whole, old, bare, restored)
    ],
    "served": served.serve(images[:3]),
    "outside": keras.models.load_model(place / "model.keras")(images[:3]),
    "goes_on": [fit(model), fit(whole)],
    "then": weights(whole),
}
