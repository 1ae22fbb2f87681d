"""A custom `compute_loss` with ``ops.mean``, as in the docstring of Keras, plus a penalty from a layer."""

import keras
from common import Logs, batched, digits, strategy, weights
from keras import layers, ops

scope = strategy()
images, labels = digits(100)
flat = images.reshape(-1, 64)
parity = (labels % 2).astype("float64")[:, None]


class Distance(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker = keras.metrics.Mean(name="distance")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = ops.mean((y_pred - y) ** 2)
        loss = loss + ops.sum(self.losses) if self.losses else loss
        self.tracker.update_state(loss)
        return loss

    @property
    def metrics(self):
        return [self.tracker]


def train(samples, batch):
    keras.utils.set_random_seed(3)
    with scope.scope():
        inputs = layers.Input((64,))
        hidden = layers.Dense(8, "tanh", kernel_regularizer="l2")(inputs)
        model = Distance(inputs, layers.Dense(1)(hidden))
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9))
    logs = Logs()
    model.fit(batched(flat[:samples], parity[:samples], size=batch), epochs=3, verbose=0, callbacks=[logs])
    return {"weights": weights(model), "logs": logs.seen}


results = {"whole_batches": train(96, 24)}
partial = train(100, 32)
results["partial_batches"] = partial["weights"]
# A mean of batches' means counts an incomplete batch like a complete one; shares differ in that again.
results["close"] = partial["logs"]
