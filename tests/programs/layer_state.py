"""Layers with state of their own: a counter of steps, a counter of samples, a moving average.

Replicas' values are averaged, as Keras's default ``aggregation="mean"`` says: steps and a moving average are then one
process's, a count of samples is not. The average moves with each share, so what follows it is not quite one process's
either: of both, ranks are compared.
"""

import keras
import numpy as np
from common import digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, labels = digits(72)
flat = images.reshape(-1, 64)


class Steps(layers.Layer):
    """Counts the steps and the samples that it has been trained for."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False, name="steps")
        self.samples = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False, name="samples")

    def call(self, inputs, training=False):
        if training:
            self.steps.assign_add(1)
            self.samples.assign_add(ops.cast(ops.shape(inputs)[0], self.samples.dtype))
        return inputs


class RunningMean(layers.Layer):
    """Subtracts a moving average of what passes."""

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="mean")

    def call(self, inputs, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs, axis=0))
        return inputs - ops.stop_gradient(self.mean)


with scope.scope():
    model = keras.Sequential([layers.Input((64,)), Steps(), RunningMean(), layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(flat, labels, batch_size=24, epochs=2, shuffle=False, verbose=0)
results = {
    "steps": int(model.layers[0].steps.numpy()),
    "mean": np.asarray(model.layers[1].mean),
    "ranks_only": {"weights": weights(model)},
}
