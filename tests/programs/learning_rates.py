"""Learning rates as scripts read and set them: as floats, by callbacks, by schedules, between two calls of `fit`."""

import keras
import numpy as np
from common import digits, strategy, weights

scope = strategy()
images, labels = digits(48)
flat = images.reshape(-1, 64)
rates = []

with scope.scope():
    model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)


class Warmup(keras.callbacks.Callback):
    """Sets the rate by hand before each batch, as in scripts written for Horovod."""

    def on_train_batch_begin(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.01 * (batch + 1)

    def on_epoch_end(self, epoch, logs=None):
        rates.append(float(self.model.optimizer.learning_rate))
        rates.append(float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate)))


model.fit(flat, labels, batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=[Warmup()])
rates.append(float(model.optimizer.learning_rate))
model.optimizer.learning_rate.assign(0.05)
rates.append(float(model.optimizer.learning_rate.numpy()))
rates.append(float(np.asarray(model.optimizer.learning_rate)))
model.optimizer.learning_rate = model.optimizer.learning_rate * 0.5
scheduler = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * float(np.exp(-0.1)))
history = model.fit(flat, labels, batch_size=12, epochs=2, shuffle=False, verbose=0, callbacks=[scheduler])
results = {
    "rates": rates,
    "iterations": int(model.optimizer.iterations),
    "history": history.history,
    "weights": weights(model),
    "slots": [np.asarray(variable) for variable in model.optimizer.variables],
}
