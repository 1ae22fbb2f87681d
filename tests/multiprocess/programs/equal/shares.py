"""Cases of empty shares, and of what a step keeps: state, logs, the user's arrays."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops
from world import X, Y, batched, case, fitted, mlp, numbers, spread, strategy

IMAGES = X[:33].reshape(-1, 8, 8, 1)
"""33 samples in batches of 32: the last batch has one, so that all ranks but one have none."""


def model_of(*layers, loss=None, optimizer="sgd", metrics=(), shape=(64,)):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input(shape), *layers])
        model.compile(
            optimizer, loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=list(metrics)
        )
    return model


# Empty shares.


@spread
def depthwise_convolution_without_samples():
    layers = [keras.layers.DepthwiseConv2D(3), keras.layers.SeparableConv2D(4, 3), keras.layers.Flatten()]
    return fitted(model_of(*layers, keras.layers.Dense(10), shape=(8, 8, 1)), IMAGES, Y[:33])


@spread
def convolution_without_samples():
    layers = [keras.layers.Conv2D(4, 3), keras.layers.MaxPooling2D(), keras.layers.Flatten(), keras.layers.Dense(10)]
    results = fitted(model_of(*layers, shape=(8, 8, 1)), IMAGES, Y[:33])
    with strategy.scope():
        low = keras.Sequential(
            [keras.layers.Input((8, 8, 1)), keras.layers.Conv2D(4, 3, dtype="float32"), keras.layers.Flatten()]
        )
    results["float32"] = low.predict(IMAGES[:1], verbose=0).tolist()  # by oneDNN
    return results


@spread
def recurrence_without_samples():
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8, 8)), keras.layers.LSTM(5), keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    first = model.predict(X[:1].reshape(-1, 8, 8), verbose=0).tolist()
    return {**fitted(model, X[:33].reshape(-1, 8, 8), Y[:33]), "first": first}


@spread
def attention_without_samples():
    with strategy.scope():
        inputs = keras.Input((8, 8))
        hidden = keras.layers.MultiHeadAttention(2, 4, use_bias=False)(inputs, inputs)
        hidden = keras.layers.LayerNormalization()(hidden + inputs)
        model = keras.Model(inputs, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling1D()(hidden)))
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, X[:33].reshape(-1, 8, 8), Y[:33])


@spread
def ctc_without_samples():
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8, 8)), keras.layers.Dense(5)])
        model.compile("sgd", keras.losses.CTC())
    labels = 1 + (np.arange(33 * 3).reshape(33, 3) * 7) % 4
    return {"float32": fitted(model, X[:33].reshape(-1, 8, 8), labels)}


@spread
def synchronized_normalization_without_samples():
    layers = [keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(10)]
    return fitted(model_of(*layers), X[:33], Y[:33])


@spread
def metrics_without_samples():
    def right(y_true, y_pred):  # a scalar, which is of the share
        return ops.mean(ops.cast(ops.equal(y_pred > 0.5, ops.cast(y_true, "bool")), "float64"))

    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(1, activation="sigmoid")])
        model.compile("sgd", "binary_crossentropy", metrics=["AUC", "Precision", "mse", right])
    results = fitted(model, X[:33], (Y[:33] % 2).reshape(-1, 1))
    of_shares = results["history"].pop("right")
    assert np.isfinite(of_shares).all(), of_shares
    return {**results, "ranks_only": of_shares}


@spread
def components_with_other_numbers_of_rows():
    """A batch of graphs: sizes and nodes. One process trains on it; it cannot be divided."""

    class Graphs(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, graphs):
            values = self.dense(graphs["nodes"][:, None])
            return tf.math.segment_sum(values, tf.repeat(tf.range(tf.size(graphs["sizes"])), graphs["sizes"]))

    def batches():
        for _ in range(3):
            yield {"sizes": np.array([2, 4], "int32"), "nodes": np.arange(6.0)}, np.ones((2, 1))

    signature = {"sizes": tf.TensorSpec([None], "int32"), "nodes": tf.TensorSpec([None], "float64")}
    data = tf.data.Dataset.from_generator(batches, output_signature=(signature, tf.TensorSpec([None, 1], "float64")))
    for eagerly in (False, True):
        with strategy.scope():
            model = Graphs()
            model.compile("sgd", "mse", run_eagerly=eagerly)
        if strategy.num_replicas_in_sync == 1:
            model.fit(data, verbose=0)
            continue
        with pytest.raises(ValueError, match=r"cannot be divided .* Rows: 0/nodes has 6, 0/sizes has 2, 1 has 2\."):
            model.fit(data, verbose=0)
    return {}


# State that layers keep.


@spread
def moving_means_are_those_of_one_process():
    model = model_of(keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(10))
    model.fit(batched(X[:192], Y[:192]), epochs=1, verbose=0)
    return {"moving_mean": model.layers[0].moving_mean.numpy().tolist(), "ranks_only": numbers(model)["weights"]}


class Counting(keras.layers.Layer):
    """Counts in every way that there is."""

    def build(self, shape):
        def count(name, **how):
            return self.add_weight(name=name, shape=(), initializer="zeros", trainable=False, **how)

        self.steps = count("steps", dtype="int64")
        self.samples = count("samples", dtype="int64", aggregation="sum")
        self.largest_share = count("largest_share", dtype="float64")

    def call(self, inputs, training=False):
        if training:
            rows = ops.shape(inputs)[0]
            self.steps.assign_add(1)
            self.samples.assign_add(ops.cast(rows, "int64"))
            self.largest_share.assign(ops.maximum(self.largest_share, ops.cast(rows, "float64")))
        return inputs


@spread
def counts_of_a_layer():
    model = model_of(Counting(), keras.layers.Dense(10))
    model.fit(batched(X[:33], Y[:33]), epochs=2, verbose=0)
    layer = model.layers[0]
    return {
        "steps": int(layer.steps.numpy()),
        "samples": int(layer.samples.numpy()),
        "ranks_only": [float(layer.largest_share.numpy())],
    }


class Slow(keras.Model):
    """Keeps averages of its weights, as diffusion models and teachers do."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(10)
        self.slow = keras.layers.Dense(10, trainable=False)

    def build(self, shape):
        self.dense.build(shape)
        self.slow.build(shape)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        logs = super().train_step(data)
        for slow, fast in zip(self.slow.weights, self.dense.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        return logs


@spread
def averages_of_weights():
    with strategy.scope():
        model = Slow()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, X[:33], Y[:33])


# Metrics and logs.


class Extremes(keras.metrics.Metric):
    def __init__(self, name="extremes"):
        super().__init__(name=name)
        self.high = self.add_variable((), "zeros", name="high")
        self.low = self.add_variable((), "zeros", name="low")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.high.assign(ops.maximum(self.high, ops.cast(ops.max(y_pred), self.high.dtype)))
        self.low.assign(ops.minimum(self.low, ops.cast(ops.min(y_pred), self.low.dtype)))

    def result(self):
        return {"high": 1.0 * self.high, "low": 1.0 * self.low}  # not the variables: Keras would read them later


@spread
def a_metric_that_keeps_a_maximum():
    with strategy.scope():
        extremes = Extremes()
    return fitted(mlp(metrics=[extremes]), validation_data=batched(X[:41], Y[:41]))


@spread
def logs_of_batches():
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append({name: float(value) for name, value in logs.items()})

    mlp(metrics=["accuracy"]).fit(batched(X, Y), epochs=2, verbose=0, callbacks=[Watch()])
    return {"logs": seen}


class OwnSteps(keras.Model):
    """As Keras's guide on `train_step` writes it, and with a `test_step` that returns a part of the metrics."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(10)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.right = keras.metrics.SparseCategoricalAccuracy(name="right")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        self.loss_tracker.update_state(loss)
        self.right.update_state(y, y_pred)
        return {**{m.name: m.result() for m in self.metrics}, "of_the_batch": loss, "rows": ops.mean(x)}

    def test_step(self, data):
        x, y = data
        self.right.update_state(y, self(x, training=False))
        return {"right": self.right.result()}

    @property
    def metrics(self):
        return [self.loss_tracker, self.right]


@spread
def logs_of_own_steps():
    with strategy.scope():
        model = OwnSteps()
        model.compile("sgd")
    plateau = keras.callbacks.ReduceLROnPlateau("val_right", mode="max", factor=0.5, patience=0, min_delta=0.5)
    # Full batches: the guide's tracker gives each batch the same weight, whatever its size.
    return fitted(model, X[:192], Y[:192], validation_data=batched(X[:41], Y[:41]), epochs=4, callbacks=[plateau])


@case
def logs_of_a_traced_step():
    class Traced(OwnSteps):
        train_step = tf.function(OwnSteps.train_step)

    with strategy.scope():
        model = Traced()
        model.compile("sgd")
    return fitted(model, X[:192], Y[:192])


# The user's arrays.


@case
def arrays_are_never_written_to():
    x, y = np.ascontiguousarray(X[:192]), np.ascontiguousarray(Y[:192].astype("float64").reshape(-1, 1))
    kept = x.copy(), y.copy()

    class Views(keras.utils.PyDataset):
        def __len__(self):
            return 6

        def __getitem__(self, index):
            return x[index * 32 : (index + 1) * 32], y[index * 32 : (index + 1) * 32]

    def batches():
        for index in range(6):
            yield x[index * 32 : (index + 1) * 32], y[index * 32 : (index + 1) * 32]

    signature = (tf.TensorSpec([None, 64], "float64"), tf.TensorSpec([None, 1], "float64"))
    model = model_of(keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1), loss="mse", metrics=["mae"])
    for data in (Views(), batches(), tf.data.Dataset.from_generator(batches, output_signature=signature)):
        model.fit(data, epochs=1, verbose=0)
    model.evaluate(Views(), verbose=0)
    assert (x == kept[0]).all(), "x was written to"
    assert (y == kept[1]).all(), "y was written to"
    return {"ranks_only": numbers(model)["weights"]}
