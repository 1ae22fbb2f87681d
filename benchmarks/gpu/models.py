"""Models that are trained on GPUs, and their data."""

import keras
import numpy as np

layers = keras.layers


def mlp():
    """Three wide layers, whose gradients are 22 MiB."""
    return keras.Sequential(
        [
            layers.Input((784,)),
            layers.Dense(2048, "relu"),
            layers.Dense(2048, "relu"),
            layers.Dense(10),
        ]
    )


def cnn():
    """A small residual network, with BatchNormalization."""
    inputs = x = layers.Input((32, 32, 3))
    for filters in (64, 128, 256):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, 2, "same")(x)))
        for _ in range(2):
            y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x)))
            x = layers.ReLU()(x + layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(y)))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def text(rate=0.0):
    """Two blocks of a transformer, whose embedding has sparse gradients."""
    inputs = layers.Input((64,), dtype="int32")
    x = layers.Embedding(2000, 128)(inputs)
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(4, 32, dropout=rate)(x, x))
        y = layers.Dropout(rate)(layers.Dense(128)(layers.Dense(512, "gelu")(x)))
        x = layers.LayerNormalization()(x + y)
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def recurrent():
    """Returns a model with one LSTM layer."""
    return keras.Sequential([layers.Input((32, 16)), layers.LSTM(64), layers.Dense(10)])


MODELS = {"mlp": mlp, "cnn": cnn, "text": text, "recurrent": recurrent, "dropout": lambda: text(0.2)}


def data(name, rows):
    """Random inputs and labels of a model."""
    generator = np.random.default_rng(0)
    shape = {"mlp": (784,), "cnn": (32, 32, 3), "recurrent": (32, 16)}.get(name, (64,))
    is_text = name in ("text", "dropout")
    inputs = generator.integers(0, 2000, (rows, *shape)) if is_text else generator.normal(size=(rows, *shape))
    return inputs.astype("int32" if is_text else "float32"), generator.integers(0, 10, rows)


def compiled(name, optimizer, jit_compile="auto"):
    """A new model with equal initial weights in every process."""
    keras.utils.set_random_seed(0)
    model = MODELS[name]()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model
