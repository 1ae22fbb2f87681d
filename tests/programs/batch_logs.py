"""A callback that reads the logs of each batch and decides by them, as a finder of learning rates does."""

import keras
from common import digits, strategy, weights

scope = strategy()
images, labels = digits(96)
flat = images.reshape(-1, 64)
seen = []


class RateFinder(keras.callbacks.Callback):
    """Raises the rate after each batch until the loss does not fall any more."""

    best = float("inf")

    def on_train_batch_end(self, batch, logs=None):
        seen.append(float(logs["loss"]))
        if logs["loss"] > self.best - 0.01:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5
        self.best = min(self.best, float(logs["loss"]))


with scope.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(flat, labels, batch_size=12, epochs=1, shuffle=False, verbose=0, callbacks=[RateFinder()])
results = {"weights": weights(model), "rate": model.optimizer.learning_rate, "seen": seen}
