"""A miniature language model: causal attention with padding masks, next-word loss, text drawn after each epoch."""

import keras
import numpy as np
import tensorflow as tf
from common import strategy, weights
from keras import layers, ops

scope = strategy()
rng = np.random.default_rng(10)
lengths = np.where(np.arange(49) < 25, 3, 7)
words = np.where(np.arange(7)[None] < lengths[:, None], rng.integers(1, 15, (49, 7)), 0)
inputs_, targets = words[:, :-1], words[:, 1:]


class TokenAndPosition(layers.Layer):
    def __init__(self, count, width, **kwargs):
        super().__init__(**kwargs)
        self.token = layers.Embedding(count, width, mask_zero=True)
        self.position = layers.Embedding(6, width)
        self.supports_masking = True

    def call(self, words):
        return self.token(words) + self.position(ops.arange(ops.shape(words)[-1]))

    def compute_mask(self, words, mask=None):
        return self.token.compute_mask(words)


class Generated(keras.callbacks.Callback):
    """Draws the likeliest next words on every rank, with `predict` inside a callback."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def on_epoch_end(self, epoch, logs=None):
        text = [1, 2]
        for _ in range(2):
            padded = np.array([text + [0] * (6 - len(text))])
            text.append(int(self.model.predict(padded, verbose=0)[0, len(text) - 1].argmax()))
        self.texts.append(text)


with scope.scope():
    inputs = keras.Input((6,), dtype="int32")
    x = TokenAndPosition(15, 8)(inputs)
    x = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    model = keras.Model(inputs, layers.Dense(15)(layers.LayerNormalization()(x)))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, weighted_metrics=["accuracy"])

data = tf.data.Dataset.from_tensor_slices((inputs_, targets)).batch(16)
generated = Generated()
history = model.fit(data, epochs=2, verbose=0, callbacks=[generated])
results = {"weights": weights(model), "history": history.history, "texts": generated.texts}
TOLERANCE = 1e-8
