"""Tagging and classification of padded sequences: ``mask_zero``, LSTM, a loss over valid steps only.

Keras averages a masked loss over the valid steps of the batch; shares hold different numbers of them.
"""

import keras
import numpy as np
from common import strategy, weights
from keras import layers

scope = strategy()
rng = np.random.default_rng(1)
lengths = np.concatenate([rng.integers(1, 3, 30), rng.integers(4, 7, 35)])  # short ones first: shares differ much
words = np.where(np.arange(6)[None] < lengths[:, None], rng.integers(1, 30, (65, 6)), 0)
tags = (words % 4).astype("int64")


def train(hidden, sample_weight=None, **arguments):
    keras.utils.set_random_seed(8)
    with scope.scope():
        embedding = layers.Embedding(30, 6, mask_zero=True)
        model = keras.Sequential([layers.Input((None,), dtype="int64"), embedding, hidden(), layers.Dense(4)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=["accuracy"])
    history = model.fit(
        words, tags, sample_weight=sample_weight, batch_size=32, epochs=2, shuffle=False, verbose=0, **arguments
    )
    return model, {"weights": weights(model), "history": history.history}


model, recurrent = train(lambda: layers.LSTM(5, return_sequences=True))
recurrent["outputs"] = model.predict(words[:20], batch_size=8, verbose=0)
importance = np.linspace(0, 1, 65 * 6).reshape(65, 6)
_, weighed = train(
    lambda: layers.TimeDistributed(layers.Dense(5, "tanh")),
    sample_weight=importance,
    validation_data=(words, tags, importance[::-1]),
)
results = {"recurrent": recurrent, "weighed": weighed}
