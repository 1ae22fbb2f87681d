"""Custom `train_step` and `test_step`, in three ways from Keras's guides.

A loop over ``self.metrics`` with ``update_state(loss)``, own trackers, and `sample_weight`; a `test_step` returns a
part of the metrics only. Callbacks decide by those logs.
"""

import keras
import numpy as np
import tensorflow as tf
from common import Logs, batched, digits, strategy, weights

scope = strategy()
images, labels = digits(144)
flat = images.reshape(-1, 64)
target = np.stack([labels % 2, labels > 4], axis=1).astype("float64")
importance = np.linspace(0.2, 1.8, 144)


class Guided(keras.Model):
    """Compiled losses and metrics, taken one step at a time."""

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred, sample_weight=sample_weight)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        loss = self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {"loss": self.metrics[0].result()}  # a part of what is tracked


class Tracked(keras.Model):
    """Only the optimizer is compiled."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_function = keras.losses.MeanSquaredError()

    @property
    def metrics(self):
        return [self.loss_tracker, self.error]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_function(y, y_pred)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.loss_tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {"loss": self.loss_tracker.result(), "mae": self.error.result()}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.error.update_state(y, y_pred)
        return {"mae": self.error.result(), "plain": tf.reduce_mean((y - y_pred) ** 2)}  # and a number of its own


def build(model_class, **compile_arguments):
    keras.utils.set_random_seed(4)
    with scope.scope():
        inputs = keras.Input((64,))
        hidden = keras.layers.Dense(8, activation="tanh")(inputs)
        model = model_class(inputs, keras.layers.Dense(2)(hidden))
        model.compile(optimizer=keras.optimizers.SGD(0.01, momentum=0.9), **compile_arguments)
    return model


def train(model, *data, **arguments):
    logs = Logs()
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=0.05)
    history = model.fit(batched(*data, size=36), epochs=4, verbose=0, callbacks=[logs, plateau], **arguments)
    return {"weights": weights(model), "history": history.history, "logs": logs.seen}


guided = build(Guided, loss="mse", metrics=["mae"])
results = {"guided": train(guided, flat, target, importance, validation_data=batched(flat[:72], target[:72], size=36))}
results["guided_evaluated"] = guided.evaluate(batched(flat, target, size=36), verbose=0, return_dict=True)
tracked = build(Tracked)
results["tracked"] = train(tracked, flat, target, validation_data=batched(flat[:72], target[:72], size=72))

# Shares of unequal sizes: the steps are the same, a mean of batches' means is not.
history = tracked.fit(batched(flat[:103], target[:103], size=32), epochs=2, verbose=0).history
results["unequal_weights"] = weights(tracked)
results["close"] = history
