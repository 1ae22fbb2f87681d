"""Layers in device scopes under a strategy; see `tests/multiprocess/test_device_scopes.py`."""

import contextlib
import json
import os

import keras
import numpy as np
import tensorflow as tf

import tfdist

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 3
)
STEPS, ROWS = 10, 8
generator = np.random.default_rng(0)
X = generator.normal(size=(STEPS * ROWS, 8)).astype("float32")
Y = X[:, :2] * X[:, 2:4]


def make(first=None, second=None):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    with tfdist.device_scope(first) if first else contextlib.nullcontext():
        hidden = keras.layers.LayerNormalization()(keras.layers.Dense(16, "silu")(inputs))
    with tfdist.device_scope(second) if second else contextlib.nullcontext():
        outputs = keras.layers.Dense(2)(hidden)
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    return model


def train(model):
    model.fit(X, Y, batch_size=ROWS, epochs=2, shuffle=False, verbose=0)
    return model


def homes(variables):
    return [variable.value.device[-5:] for variable in variables]


has_servers = "ps" in json.loads(os.environ["TF_CONFIG"])["cluster"]
if has_servers:  # every worker trains on all of the data: it is compared with itself
    strategy = tfdist.ParameterServerStrategy()
else:
    alone = train(make("CPU:0", "CPU:0")).get_weights()
    strategy = tfdist.AllReduceStrategy()
with strategy.scope():
    model = make("CPU:1", "CPU:2")
before = model.get_weights()
train(model)
result = {
    "homes": homes(model.trainable_variables),
    "slots": homes(model.optimizer.variables[2:]),
    "sum": float(sum(np.sum(weight, dtype="float64") for weight in model.get_weights())),
    "change": float(np.abs(model.get_weights()[0] - before[0]).max()),
}
if not has_servers:
    errors = [np.abs(value - other).max() for value, other in zip(model.get_weights(), alone, strict=True)]
    result["error"] = float(max(errors))
    with tfdist.AllReduceStrategy(devices=["CPU:1", "CPU:2"], cpu_relocation=True).scope():
        relocated = make()
    train(relocated)
    weights = [*relocated.trainable_variables, *relocated.optimizer.variables[2:]]
    result["relocated"] = sorted({value.device[-5:] for weight in weights for value in weight.value.values})
    errors = [np.abs(value - other).max() for value, other in zip(relocated.get_weights(), alone, strict=True)]
    result["relocated error"] = float(max(errors))
print("RESULT", json.dumps(result), flush=True)
