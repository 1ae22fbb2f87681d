"""A siamese network: one encoder for two images, a contrastive loss, and ``add_loss`` of a mean in a layer."""

import keras
import tensorflow as tf
from common import digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, labels = digits(130)
left, right = images[:65], images[65:]
same = (labels[:65] % 2 == labels[65:] % 2).astype("float64")[:, None]


def contrastive(margin):
    def loss(y_true, y_pred):
        apart = ops.square(ops.maximum(margin - y_pred, 0.0))
        return ops.mean(y_true * ops.square(y_pred) + (1 - y_true) * apart, axis=-1)

    return loss


class Spread(layers.Layer):
    """Keeps embeddings near the unit sphere by a loss of its own."""

    def call(self, embedding):
        norm = ops.sum(ops.square(embedding), axis=-1)
        self.add_loss(0.1 * ops.mean(ops.square(norm - 1.0)))
        return embedding


with scope.scope():
    encoder = keras.Sequential(
        [layers.Input((8, 8, 1)), layers.Conv2D(4, 3, activation="tanh"), layers.Flatten(), layers.Dense(4), Spread()]
    )
    a, b = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    distance = layers.Lambda(lambda pair: ops.sqrt(ops.sum((pair[0] - pair[1]) ** 2, axis=1, keepdims=True) + 1e-9))
    model = keras.Model([a, b], distance([encoder(a), encoder(b)]))
    model.compile(keras.optimizers.RMSprop(0.005), contrastive(1.0), metrics=["mae"])

data = tf.data.Dataset.from_tensor_slices(((left, right), same)).batch(32)
history = model.fit(data, epochs=2, verbose=0, validation_data=data)
results = {"weights": weights(model), "history": history.history, "outputs": model.predict([left, right], verbose=0)}
