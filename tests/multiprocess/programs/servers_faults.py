"""Asynchronous training that waits for a file in its fourth epoch; see `tests/multiprocess/test_servers_faults.py`."""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

from tfdist.parameter_server import Servers
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

ROWS = 20_000
"""More than are used."""

folder = Path(sys.argv[1])
kept = Servers(copies=1) if "copies" in sys.argv else Servers(snapshots=folder / "snapshots", snapshot_seconds=0.2)
strategy = ParameterServerStrategy(servers=kept)
task = json.loads(os.environ["TF_CONFIG"])["task"]
images, labels = load_digits(return_X_y=True)
has_table = sys.argv[2] == "embedding"
images = images.astype("int64") + 17 * np.arange(64) if has_table else (images / 16).astype("float32")
worker = task["index"]
keras.utils.set_random_seed(worker)
with strategy.scope():
    layers = (
        [keras.layers.Embedding(ROWS, 64), keras.layers.GlobalAveragePooling1D()]  # a row for each value of a pixel
        if has_table
        else [keras.layers.Dense(128, "relu")]
    )
    model = keras.Sequential([keras.layers.Input((64,)), *layers, keras.layers.Dense(10, "softmax")])
    optimizer = keras.optimizers.RMSprop(0.02) if has_table else keras.optimizers.Adam(2e-3)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])


class Waits(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("EPOCH", epoch, flush=True)
        end = time.monotonic() + 120
        while epoch == 3 and not (folder / f"go {worker}").exists():
            assert time.monotonic() < end
            time.sleep(0.01)


callbacks = [Waits()]
if worker == 0:
    callbacks.insert(0, keras.callbacks.BackupAndRestore(folder / "backup"))
model.fit(images[worker:1400:2], labels[worker:1400:2], epochs=8, batch_size=32, verbose=0, callbacks=callbacks)
accuracy = model.evaluate(images[1400:], labels[1400:], verbose=0)[1]
(link,) = strategy.extended.links(model)
result = {
    "accuracy": accuracy,
    "pushes": link.session.pushes,
    "iterations": int(model.optimizer.iterations),
    "version": link.session.version,
    "tables sent": link.report().sent / (ROWS * 64 * 4),
}
print("RESULT", json.dumps(result), flush=True)
