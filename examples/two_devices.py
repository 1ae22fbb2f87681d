"""Are two scanned digits equal? An LSTM reads each of them on its own device, with one set of weights.

The devices are two GPUs, or else two logical devices of the CPU. The digits come with scikit-learn
(`pip install '.[examples]'`).

    python examples/two_devices.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import tfdist

keras.utils.set_random_seed(0)
if len(tf.config.list_physical_devices("GPU")) >= 2:
    devices = ["GPU:0", "GPU:1"]
else:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    devices = ["CPU:0", "CPU:1"]


def pairs(images, labels, count):
    """Returns pairs of images, each image a sequence of 8 rows; at least half of the pairs show the same digit."""
    generator = np.random.default_rng(0)
    first = generator.integers(0, len(images), count)
    second = generator.integers(0, len(images), count)
    for place in range(0, count, 2):
        second[place] = generator.choice(np.flatnonzero(labels == labels[first[place]]))
    return [images[first], images[second]], (labels[first] == labels[second]).astype("float32")


digits = load_digits()
train = pairs(digits.images[:1400] / 16, digits.target[:1400], 8000)
test = pairs(digits.images[1400:] / 16, digits.target[1400:], 1000)

inputs = [keras.layers.Input((8, 8)), keras.layers.Input((8, 8))]
encoder = keras.layers.LSTM(64)
codes = []
for device, sequence in zip(devices, inputs, strict=True):
    with tfdist.device_scope(device):
        codes.append(encoder(sequence))
with tfdist.device_scope("CPU:0"):
    difference = keras.ops.abs(codes[0] - codes[1])
    hidden = keras.layers.Dense(32, activation="relu")(difference)
    outputs = keras.layers.Dense(1, activation="sigmoid")(hidden)
model = keras.Model(inputs, outputs)
model.compile(keras.optimizers.Adam(3e-3), "binary_crossentropy", metrics=["accuracy"])
model.fit(*train, batch_size=64, epochs=8, verbose=2)
loss, accuracy = model.evaluate(*test, verbose=0)
print(f"Test accuracy: {accuracy:.3f}, on {' and '.join(devices)}")
