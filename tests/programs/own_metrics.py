"""Metrics of the user's own: a confusion matrix, a function, a running mean; their variables say how they merge.

Keras's `add_variable` sets "sum" by default. It has no aggregation for a maximum: tfdist detects it from the step. An
update with ``aggregation="none"`` that it cannot detect must raise an error with the metric's name.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from common import batched, digits, strategy
from keras import ops

scope = strategy()
images, labels = digits(90)
flat = images.reshape(-1, 64)


class Confusion(keras.metrics.Metric):
    def __init__(self, name="recall", **kwargs):
        super().__init__(name=name, **kwargs)
        self.matrix = self.add_weight(shape=(10, 10), initializer="zeros", name="matrix")

    def update_state(self, y_true, y_pred, sample_weight=None):
        predicted = ops.argmax(y_pred, axis=-1)
        self.matrix.assign_add(tf.math.confusion_matrix(ops.reshape(y_true, (-1,)), predicted, 10, dtype="float64"))

    def result(self):
        return ops.mean(ops.diagonal(self.matrix) / ops.maximum(ops.sum(self.matrix, axis=1), 1.0))


class Recent(keras.metrics.Metric):
    """A moving average of the largest logit; the mean over processes is the same average."""

    def __init__(self, name="recent", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), "zeros", aggregation="mean", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(0.5 * self.value + 0.5 * ops.mean(ops.max(y_pred, axis=-1)))

    def result(self):
        return 1.0 * self.value  # not the variable itself: Keras would read it later


class Worst(keras.metrics.Metric):
    def __init__(self, name="worst", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), "zeros", aggregation="none", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.maximum(self.value, 1 - ops.min(ops.max(ops.softmax(y_pred), axis=-1))))

    def result(self):
        return 1.0 * self.value  # not the variable itself: Keras would read it later


class Least(keras.metrics.Metric):
    """A minimum that begins at 1, which is not a sum of parts."""

    def __init__(self, name="least", **kwargs):
        super().__init__(name=name, **kwargs)
        self.value = self.add_variable((), "ones", name="value")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.minimum(self.value, ops.min(ops.max(ops.softmax(y_pred), axis=-1)) + 0.9))

    def result(self):
        return 1.0 * self.value

    def reset_state(self):
        self.value.assign(1.0)


class Last(Worst):
    """Keeps a value of the last batch, which cannot be merged."""

    def __init__(self, name="last", **kwargs):
        super().__init__(name=name, **kwargs)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(ops.max(y_pred))


def mean_margin(y_true, y_pred):
    first, second = ops.max(y_pred, axis=-1), ops.min(y_pred, axis=-1)
    return first - second


def build(*metrics):
    with scope.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer, loss, metrics=[metric() if isinstance(metric, type) else metric for metric in metrics])
    return model


model = build(Confusion, Recent, mean_margin, "sparse_categorical_accuracy")
data = batched(flat, labels, size=30)
history = model.fit(data, epochs=2, verbose=0, validation_data=batched(flat[:60], labels[:60], size=30))
alone = keras.metrics.MeanSquaredError()  # outside of all of it
alone.update_state(np.zeros(4), np.arange(4.0))

extremes = build(Worst, Least)
maximum = extremes.fit(data, epochs=1, verbose=0)
last = build(Last)
if scope.num_replicas_in_sync > 1:
    with pytest.raises(ValueError, match="last/value cannot be merged over replicas: its aggregation is 'none'"):
        last.fit(data, epochs=1, verbose=0)
else:
    last.fit(data, epochs=1, verbose=0)

results = {"history": history.history, "alone": float(alone.result()), "maximum": maximum.history}
