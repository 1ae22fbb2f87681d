"""Trains one weight while a variable says, step by step, whether gradients are reduced; prints it after each step."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

import tfdist

keras.config.set_floatx("float64")
devices, sizes, cases = json.loads(sys.argv[1])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
strategy = tfdist.AllReduceStrategy(devices=[f"CPU:{device}" for device in range(devices)], check_weights=False)
reduces = tf.Variable(True)
spec = tf.TensorSpec((None, 1), tf.float64)


class Model(keras.Sequential):
    traces = 0

    def train_step(self, data):
        self.traces += 1
        return super().train_step(data)


def optimizer(case):
    if case == "accumulated":
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    if case == "scaled":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    return keras.optimizers.SGD(0.1, clipvalue=100.0)


class Watch(keras.callbacks.Callback):
    def __init__(self, pattern):
        super().__init__()
        self.pattern = pattern
        self.weights = []

    def on_train_batch_begin(self, batch, logs=None):
        reduces.assign(self.pattern[batch])

    def on_train_batch_end(self, batch, logs=None):
        copies = strategy.experimental_local_results(self.model.weights[0].value)
        self.weights.append([float(copy.numpy()[0, 0]) for copy in copies])


def batches():
    first = 0
    for size in sizes:
        samples = np.arange(first, first + size, dtype=float)[:, None]
        yield np.ones_like(samples), samples
        first += size


def trained(case, pattern):
    strategy.extended.reduces_gradients = pattern[0] if case == "fixed" else reduces
    with strategy.scope():
        model = Model([keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        model.compile(optimizer(case), "mse", run_eagerly=case == "eager")
    watch = Watch(pattern)
    data = tf.data.Dataset.from_generator(batches, output_signature=(spec, spec))
    model.fit(data, steps_per_epoch=len(sizes), verbose=0, callbacks=[watch])
    return {"weights": watch.weights, "traces": model.traces}


print("RESULT", json.dumps({case: trained(case, pattern) for case, pattern in cases.items()}), flush=True)
