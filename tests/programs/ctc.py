"""Speech recognition with CTC in the manner of keras.io: frames to characters, a loss of one number per sequence."""

import keras
import numpy as np
from common import strategy, weights
from keras import layers, ops

scope = strategy()
rng = np.random.default_rng(2)
sounds = rng.normal(size=(41, 12, 5))
spoken = rng.integers(1, 6, (41, 4))


def ctc_loss(y_true, y_pred):
    count = ops.shape(y_true)[0]
    lengths = ops.full((count,), 4, dtype="int32")
    frames = ops.full((count,), 12, dtype="int32")
    return ops.ctc_loss(ops.cast(y_true, "int32"), y_pred, lengths, frames)


with scope.scope():
    model = keras.Sequential(
        [layers.Input((12, 5)), layers.Conv1D(8, 3, padding="same", activation="relu"), layers.Dense(6)]
    )
    model.compile(keras.optimizers.Adam(0.01), ctc_loss)
history = model.fit(sounds, spoken, batch_size=20, epochs=2, shuffle=False, verbose=0)  # the last batch holds one
results = {"weights": weights(model), "history": history.history, "one_row": model.predict(sounds[:1], verbose=0)}
TOLERANCE = 1e-6  # TensorFlow computes CTC in float32
