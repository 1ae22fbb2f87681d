"""A worker of `QuorumStrategy` that trains to the epoch that a file names; others die, stop, and come again."""

import json
import sys
import zlib
from pathlib import Path

import keras
import numpy as np

import tfdist

LAST = Path(sys.argv[1]) / "last"

strategy = tfdist.QuorumStrategy(
    sync_every=4,
    grace=1.0,
    rule=tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.5)),
    timeouts=tfdist.Timeouts(start=60),
)
keras.utils.set_random_seed(strategy.rank)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.layers.Input((5,)),
            keras.layers.Dense(8),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")

generator = np.random.default_rng(0)
x = generator.normal(size=(300, 5)).astype("float32")
y = np.abs(x).sum(axis=1, keepdims=True)


class Tells(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"EPOCH {epoch} {logs['val_loss']:.4f}", flush=True)
        if LAST.exists() and epoch >= int(LAST.read_text()):
            self.model.stop_training = True


history = model.fit(
    x[strategy.rank :: strategy.size],
    y[strategy.rank :: strategy.size],
    batch_size=10,
    epochs=1_000_000,
    validation_data=(x, y),
    validation_batch_size=100,
    verbose=0,
    callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.999 * rate), Tells()],
)
hashes = [zlib.crc32(weight.numpy().tobytes()) for weight in model.weights]
losses = history.history.get("val_loss", [])
late = sum(count for missed, count in strategy.extended.staleness(model).items() if missed)
rates = [float(rate) for rate in history.history.get("learning_rate", [])]
result = {"hashes": hashes, "epochs": history.epoch, "losses": losses, "late": late, "rates": rates}
print("RESULT", json.dumps(result), flush=True)
