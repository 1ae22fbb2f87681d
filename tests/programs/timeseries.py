"""Weather forecasting as keras.io has it: ``timeseries_dataset_from_array``, an LSTM, a checkpoint of the best."""

import keras
import numpy as np
from common import folder, strategy, weights

scope = strategy()
steps = np.arange(100)
readings = np.stack([np.sin(steps / 5), np.cos(steps / 7), steps / 100], axis=1)


def windows(values, targets):
    return keras.utils.timeseries_dataset_from_array(values, targets, sequence_length=5, sampling_rate=2, batch_size=20)


train = windows(readings[:70], readings[10:70, 0:1])
valid = windows(readings[70:], readings[80:, 0:1])

with scope.scope():
    inputs = keras.Input((5, 3))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(4)(inputs)))
    model.compile(keras.optimizers.Adam(0.01), "mse")

path = folder("timeseries") / "best.weights.h5"
history = model.fit(
    train,
    epochs=2,
    verbose=0,
    validation_data=valid,
    callbacks=[
        keras.callbacks.EarlyStopping("val_loss", patience=5),
        keras.callbacks.ModelCheckpoint(path, save_weights_only=True, save_best_only=True),
    ],
)
model.load_weights(path)
prediction = model.predict(np.ones((1, 5, 3)), verbose=0)  # other ranks have no row
results = {
    "one": prediction,
    "weights": weights(model),
    "history": history.history,
    "outputs": model.predict(valid, verbose=0),
}
