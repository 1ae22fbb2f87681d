"""Placement of forward, backward and update in every kind of model, read from what was executed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.model_parallel.executed import ROWS, executed, homes, places, train_step
from tests.sweeps import some, sweep
from tfdist.model_parallel.device_scope import device_scope

UPDATES = "AssignSubVariableOp"


def functional():
    inputs = keras.Input((8,))
    with device_scope("CPU:1"):
        hidden = keras.layers.Dense(16, "silu")(inputs)
    with device_scope("/cpu:2"):
        outputs = keras.layers.Dense(1)(hidden)
    return keras.Model(inputs, outputs)


def sequential():
    model = keras.Sequential([keras.Input((8,))])
    with device_scope("CPU:1"):
        model.add(keras.layers.Dense(16, "silu"))
    with device_scope("CPU:2"):
        model.add(keras.layers.Dense(1))
    return model


def built_late():
    model = keras.Sequential()
    with device_scope("CPU:1"):
        model.add(keras.layers.Dense(16, "silu"))
    with device_scope("CPU:2"):
        model.add(keras.layers.Dense(1))
    return model


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(16, "silu"), keras.layers.Dense(1)

    def call(self, inputs):
        with device_scope("CPU:1"):
            hidden = self.first(inputs)
        with device_scope("CPU:2"):
            return self.second(hidden)


def nested():
    inner_inputs = keras.Input((8,))
    with device_scope("CPU:1"):
        inner_outputs = keras.layers.Dense(16, "silu")(inner_inputs)
    inner = keras.Model(inner_inputs, inner_outputs)
    inputs = keras.Input((8,))
    with device_scope("CPU:2"):  # the innermost scope counts
        outputs = keras.layers.Dense(1)(inner(inputs))
    return keras.Model(inputs, outputs)


MODELS = {builder.__name__: builder for builder in (functional, sequential, built_late, Subclassed, nested)}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("optimizer", [sweep("sgd"), "adam"])
def test_forward_backward_and_update_are_where_layers_are_called(kind, optimizer):
    model = MODELS[kind]()
    model.compile(optimizer, "mse", jit_compile=False)
    operations = executed(train_step(model, 8))
    # 16 outputs: forward, and the gradient of the kernel; 1 output: forward, and two gradients.
    assert [operation for operation in operations if operation.is_elsewhere] == []
    assert places(operations, "MatMul") == {"CPU:1": 2, "CPU:2": 3}, [
        operation for operation in operations if "MatMul" in operation.kind
    ]
    assert places(operations, UPDATES) == {"CPU:1": 2, "CPU:2": 2}
    assert "CPU:0" not in places(operations, "Sigmoid"), "also gradients that are made in Python"
    assert homes(model.trainable_variables) == ["CPU:1", "CPU:1", "CPU:2", "CPU:2"]
    slots = model.optimizer.variables[2:]
    assert homes(slots) == (["CPU:1"] * 4 + ["CPU:2"] * 4 if optimizer == "adam" else [])
    if optimizer == "adam":
        assert "CPU:0" not in places(operations, "Sqrt")


@pytest.mark.parametrize("optimizer", ["sgd", sweep("adam")])
@pytest.mark.parametrize("kind", ["functional", "sequential", "nested"])
def test_devices_do_not_change_what_is_learnt(kind, optimizer):
    model = MODELS[kind]()
    alone = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "silu"), keras.layers.Dense(1)])
    alone.set_weights(model.get_weights())
    for each_model in (model, alone):
        each_model.compile(optimizer, "mse")
        step = train_step(each_model, 8)
        for _ in range(20):
            step()
    for weight, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5, atol=1e-6)


def two_sequences(layer, first_device="CPU:1", second_device="CPU:2"):
    """A layer that encodes two sequences, each on a device."""
    inputs = [keras.Input((5, 4)), keras.Input((5, 4))]
    with device_scope(first_device):
        first = layer(inputs[0])
    with device_scope(second_device):
        second = layer(inputs[1])
    with device_scope("CPU:0"):
        joined = keras.layers.Concatenate()([first, second])
        return keras.Model(inputs, keras.layers.Dense(1)(joined))


LAYERS = {
    "lstm": lambda: keras.layers.LSTM(8),
    "bidirectional": lambda: keras.layers.Bidirectional(keras.layers.GRU(6)),
    "cells": lambda: keras.layers.RNN([keras.layers.GRUCell(6), keras.layers.LSTMCell(6)]),
    "unrolled": lambda: keras.layers.SimpleRNN(6, unroll=True),
}


@pytest.mark.parametrize("name", some(LAYERS, 4))
def test_a_layer_that_is_called_on_two_devices_computes_on_both(name):
    keras.utils.set_random_seed(0)
    model = two_sequences(LAYERS[name]())
    keras.utils.set_random_seed(0)
    alone = two_sequences(LAYERS[name](), "CPU:0", "CPU:0")
    alone.set_weights(model.get_weights())
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    # Without devices it is eager, as it would trace longer than it trains.
    alone.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", run_eagerly=True)
    steps = train_step(model, 5, 4, inputs=2), train_step(alone, 5, 4, inputs=2)
    operations = executed(steps[0])
    steps[1]()
    assert [operation for operation in operations if operation.is_elsewhere] == []
    counts = places(operations, "MatMul")
    assert counts["CPU:1"] == counts["CPU:2"] > 2
    assert counts["CPU:0"] == 3, "the layer that joins them"
    shared = model.layers[2]
    assert set(homes(shared.trainable_variables)) == {"CPU:1"}, "where it was called first"
    for _ in range(5):
        for step in steps:
            step()
    for weight, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-4, atol=1e-5)


def test_keras_operations_run_on_scope_device():
    inputs = keras.Input((8,))
    with device_scope("CPU:2"):
        outputs = keras.ops.sum(keras.ops.sin(inputs) * 2.0, axis=1, keepdims=True)
    model = keras.Model(inputs, outputs)
    operations = executed(lambda: model.predict_on_batch(np.ones((ROWS, 8), "float32")))
    assert places(operations, "Sin") == {"CPU:2": 1}


def test_fit_evaluate_and_predict_run_on_scope_devices():
    model = functional()
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    history = model.fit(x, x[:, :1], epochs=3, verbose=0, validation_split=0.25).history
    assert history["loss"][-1] < history["loss"][0]
    assert model.predict(x, verbose=0).shape == (64, 1)
    operations = executed(lambda: model.evaluate(x, x[:, :1], verbose=0))
    assert "CPU:0" not in places(operations, "MatMul")


def test_eager_calls_run_on_scope_device():
    with device_scope("CPU:2"):
        value = tf.constant([1.0]) + 1.0
    assert value.device.endswith("CPU:2")
    assert functional()(np.ones((2, 8), "float32")).device.endswith("CPU:2")


def test_the_innermost_scope_counts():
    with device_scope("CPU:1"):
        with device_scope("CPU:2"):
            inner = keras.layers.Dense(2)
            inner.build((None, 3))
        outer = keras.layers.Dense(2)
        outer.build((None, 3))
    assert homes(inner.variables) == ["CPU:2"] * 2
    assert homes(outer.variables) == ["CPU:1"] * 2


def test_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = functional()
        alone = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "silu"), keras.layers.Dense(1)])
    finally:
        keras.config.set_dtype_policy("float32")
    alone.set_weights(model.get_weights())
    for each_model in (model, alone):
        each_model.compile(keras.optimizers.SGD(0.05), "mse", run_eagerly=each_model is alone)
    steps = train_step(model, 8), train_step(alone, 8)
    operations = executed(steps[0])
    assert [operation for operation in operations if operation.is_elsewhere] == []
    assert set(places(operations, "MatMul")) == {"CPU:1", "CPU:2"}
    steps[1]()
    for _ in range(19):
        losses = [float(step()) for step in steps]
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)


@pytest.mark.parametrize("device", ["GPU:7", "CPU:9", "nonsense", "", "/job:worker/CPU:x"])
def test_a_device_that_does_not_exist(device):
    with pytest.raises(ValueError, match=r"expected a device of this process; got .* Choose from CPU:0, CPU:1, CPU:2"):
        device_scope(device).__enter__()


@pytest.mark.parametrize("kind", MODELS)
def test_jit_compile_raises_and_names_alternative(kind):
    model = MODELS[kind]()

    def train():
        model.compile("sgd", "mse", jit_compile=True)
        train_step(model, 8)()

    with pytest.raises(ValueError, match="jit_compile=False"):
        train()


@pytest.mark.parametrize("kind", ["functional", "sequential", "built_late", "nested"])
def test_automatic_jit_compile_is_turned_off(kind):
    model = MODELS[kind]()
    model.compile("sgd", "mse")
    assert not model.jit_compile
    train_step(model, 8)()


def cnn(first_device, second_device):
    """With a connection that skips what is on the other device."""
    inputs = keras.Input((8, 8, 1))
    with device_scope(first_device):
        hidden = keras.layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    with device_scope(second_device):
        skipped = keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(hidden)  # which would do nothing
        skipped = keras.layers.BatchNormalization()(skipped)
    with device_scope(first_device):
        joined = keras.layers.Add()([hidden, skipped])
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling2D()(joined)))


def transformer(first_device, second_device):
    inputs = keras.Input((6,))
    with device_scope(first_device):
        tokens = keras.ops.cast(keras.ops.abs(inputs) * 4, "int32")
        embedded = keras.layers.Embedding(20, 8)(tokens)
        attended = keras.layers.MultiHeadAttention(2, 4)(embedded, embedded)
        hidden = keras.layers.LayerNormalization()(embedded + attended)
    with device_scope(second_device):
        fed = keras.layers.Dense(8)(keras.layers.Dense(16, "gelu")(hidden))
        hidden = keras.layers.LayerNormalization()(hidden + fed)
        return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(hidden)))


@pytest.mark.parametrize("optimizer", ["sgd", sweep("adam")])
@pytest.mark.parametrize(("make", "shape"), [(cnn, (8, 8, 1)), (transformer, (6,))])
def test_networks_learn_the_same_on_two_devices(make, shape, optimizer):
    keras.utils.set_random_seed(0)
    model, alone = make("CPU:1", "CPU:2"), make("CPU:0", "CPU:0")
    alone.set_weights(model.get_weights())
    for each_model in (model, alone):  # without devices it is eager, as it would trace longer than it trains
        each_model.compile(optimizer, "mse", run_eagerly=each_model is alone)
    steps = train_step(model, *shape), train_step(alone, *shape)
    operations = executed(steps[0])
    steps[1]()
    assert [operation for operation in operations if operation.is_elsewhere] == []
    for _ in range(19):
        for step in steps:
            step()
    for weight, other in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-5)


class OwnStep(keras.Model):
    """As in Keras's guide to a ``train_step`` of one's own."""

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Gan(keras.Model):
    """Two models on two devices, each with an optimizer, as in Keras's guide."""

    def __init__(self, first_device, second_device):
        super().__init__()
        with device_scope(first_device):
            self.generator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        with device_scope(second_device):
            self.discriminator = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        self.optimizers = [keras.optimizers.SGD(0.05, momentum=0.9) for _ in range(2)]

    def train_step(self, data):
        real = data[0]
        noise = tf.ones((ROWS, 4))
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        for number, part in enumerate((self.discriminator, self.generator)):
            with tf.GradientTape() as tape:
                logits = self.discriminator(tf.concat([self.generator(noise), real], 0))
                labels = tf.concat([tf.fill((ROWS, 1), 1.0 - number), tf.zeros((ROWS, 1))], 0)
                value = loss(labels, logits)
            self.optimizers[number].apply(tape.gradient(value, part.trainable_weights), part.trainable_weights)
        return {"loss": value}


def own_step(first_device, second_device):
    inputs = keras.Input((8,))
    with device_scope(first_device):
        hidden = keras.layers.Dense(16, "relu")(inputs)
    with device_scope(second_device):
        return OwnStep(inputs, keras.layers.Dense(1)(hidden))


@pytest.mark.parametrize("make", [own_step, Gan])
def test_custom_train_step_runs_on_scope_devices(make):
    weights = []
    for devices in (("CPU:1", "CPU:2"), ("CPU:0", "CPU:0")):
        keras.utils.set_random_seed(0)
        model = make(*devices)
        model.compile("adam", "mse")
        step = train_step(model, 8)
        assert [operation for operation in executed(step) if operation.is_elsewhere] == []
        assert set(homes(model.trainable_variables)) == set(devices)
        for _ in range(9):
            step()
        weights.append(model.get_weights())
    for weight, other in zip(*weights, strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)
