"""Matrix factorization on small tables, rows repeated within a batch, with optimizers that keep squares.

Keras squares each occurrence of a repeated row, not their sum.
"""

import keras
import numpy as np
from common import strategy, weights
from keras import layers

scope = strategy()
rng = np.random.default_rng(4)
users, items = rng.integers(0, 20, 90), rng.integers(0, 12, 90)
ratings = ((users * items) % 5).astype("float64")[:, None]


def train(optimizer):
    keras.utils.set_random_seed(11)
    with scope.scope():
        user, item = keras.Input((), dtype="int64"), keras.Input((), dtype="int64")
        u, i = layers.Embedding(50, 4)(user), layers.Embedding(12, 4)(item)
        bias = layers.Embedding(12, 1, embeddings_regularizer=keras.regularizers.L2(1e-3))(item)
        model = keras.Model([user, item], layers.Dot(1)([u, i]) + bias)
        model.compile(optimizer(), "mse")
    history = model.fit([users, items], ratings, batch_size=36, epochs=2, shuffle=False, verbose=0)
    return {"weights": weights(model), "history": history.history}


results = {
    "AdamW": train(lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1)),
    "RMSprop": train(lambda: keras.optimizers.RMSprop(0.01)),
}
