"""A stateful LSTM with a fixed batch, over consecutive windows of several series; states are reset between epochs.

The batch is fixed per replica, as under every strategy of TensorFlow: 12 series are 6 a process on two.
"""

import keras
import numpy as np
from common import batched, strategy, weights
from keras import layers

scope = strategy()
SERIES = 12
per_replica = SERIES // scope.num_replicas_in_sync
waves = np.sin(np.arange(25)[None] * np.linspace(0.2, 1.2, SERIES)[:, None])
# Window after window; within a batch, one row a series.
x = np.concatenate([waves[:, start : start + 6] for start in (0, 6, 12)])[..., None]
y = np.concatenate([waves[:, start + 6 : start + 7] for start in (0, 6, 12)])


class Forget(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[0].reset_states()


with scope.scope():
    model = keras.Sequential(
        [layers.Input(batch_shape=(per_replica, 6, 1)), layers.LSTM(4, stateful=True), layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
history = model.fit(batched(x, y, size=SERIES), epochs=2, verbose=0, callbacks=[Forget()])
results = {"weights": weights(model), "history": history.history}
model.layers[0].reset_states()
results["outputs"] = model.predict(x, batch_size=SERIES, verbose=0)
