"""Layers with state of their own: a counter of samples, a counter of calls, a codebook kept by moving averages.

A float sum of samples and an integer count of steps are what one process has; see docs/mathematics.md.
"""

import keras
import numpy as np
from keras import layers, ops
from common import digits, strategy, weights

scope = strategy()
images, labels = digits(72)
flat = images.reshape(-1, 64)


class Steps(layers.Layer):
    """Counts the steps it has been trained for."""

    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", dtype="int64", trainable=False, name="steps")

    def call(self, inputs, training=False):
        if training:
            self.steps.assign_add(1)
        return inputs


class RunningMean(layers.Layer):
    """Subtracts a moving average of what passes; each share moves its own, and the mean is what they would make."""

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
    "ranks_only": {"weights": weights(model)},
    "close": {"mean": np.asarray(model.layers[1].mean)},
}
