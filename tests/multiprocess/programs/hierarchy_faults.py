"""Digits, asynchronous, with a server on each host, of which one dies. See `tests/multiprocess/test_hierarchy.py`."""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits

from tfdist.parameter_server import Asynchronous, PerHost
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

EPOCHS, BATCH, WORKERS = 12, 32, 3
folder = Path(sys.argv[1])
strategy = ParameterServerStrategy(synchronization=Asynchronous(), servers=PerHost(Asynchronous()))
task = json.loads(os.environ["TF_CONFIG"])["task"]
worker = 0 if task["type"] == "chief" else 1 + task["index"]
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
keras.utils.set_random_seed(worker)


class Meet(keras.callbacks.Callback):
    """In its third step, each waits until the server has come back."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 3:
            print("HOLDS", flush=True)
            end = time.monotonic() + 60
            while not (folder / "back").exists():
                assert time.monotonic() < end, "the server does not come back"
                time.sleep(0.01)


with strategy.scope():
    layers = [keras.layers.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
rows = slice(worker, 1400, WORKERS)
meet = Meet()
model.fit(images[rows], labels[rows], epochs=EPOCHS, batch_size=BATCH, verbose=0, callbacks=[meet])
predictions = np.argmax(model.predict(images[1400:], verbose=0), 1)
result = {
    "steps": meet.steps,
    "iterations": int(model.optimizer.iterations),
    "accuracy": float(np.mean(predictions == labels[1400:])),
}
print("RESULT", json.dumps(result), flush=True)
