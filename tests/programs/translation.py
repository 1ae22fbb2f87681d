"""Sequence to sequence with masks, as keras.io's translation example: encoder, attention, decoder, teacher forcing."""

import keras
import numpy as np
import tensorflow as tf
from common import strategy, weights
from keras import layers

scope = strategy()
rng = np.random.default_rng(3)
lengths = np.where(np.arange(50) < 25, 2, 5)
source = np.where(np.arange(5)[None] < lengths[:, None], rng.integers(1, 20, (50, 5)), 0)
target = np.where(source > 0, (source * 7) % 19 + 1, 0)
shifted = np.concatenate([np.full((50, 1), 20), target[:, :-1]], axis=1)

with scope.scope():
    encoder_inputs = keras.Input((None,), dtype="int64", name="encoder")
    x = layers.Embedding(21, 8, mask_zero=True)(encoder_inputs)
    encoded, state = layers.GRU(8, return_sequences=True, return_state=True)(x)
    decoder_inputs = keras.Input((None,), dtype="int64", name="decoder")
    x = layers.Embedding(21, 8, mask_zero=True)(decoder_inputs)
    x = layers.GRU(8, return_sequences=True)(x, initial_state=state)
    x = x + layers.Attention()([x, encoded])
    model = keras.Model([encoder_inputs, decoder_inputs], layers.Dense(21)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile(keras.optimizers.RMSprop(0.01), loss, weighted_metrics=["accuracy"])

data = tf.data.Dataset.from_tensor_slices(({"encoder": source, "decoder": shifted}, target)).batch(24)
history = model.fit(data, epochs=2, verbose=0)
results = {"weights": weights(model), "history": history.history}
