"""Digits whose batches are dealt out; see `tests/multiprocess/test_servers_shared.py`.

A second output counts, for each sample, the updates that it was in.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from tfdist.parameter_server import Asynchronous, BoundedStaleness, Servers
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

SAMPLES, BATCH, EPOCHS, RATE = 1400, 32, 3, 0.125
folder, dies = Path(sys.argv[1]), sys.argv[2]
"""The second is "worker", "server" or "chief"; the first names a folder for all, and for snapshots."""
kept = Servers(snapshots=folder / "snapshots", snapshot_seconds=0.2) if dies == "server" else Servers()
# Worker 1 may begin when the chief has taken three steps and waits, and takes three more, from the chief's clock on.
mode = BoundedStaleness(3) if dies == "worker" else Asynchronous()
strategy = ParameterServerStrategy(synchronization=mode, servers=kept, data="shared")
task = json.loads(os.environ["TF_CONFIG"])["task"]
worker = task["index"] + (task["type"] == "worker" and dies == "chief")
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
numbers = np.arange(len(images))
keras.utils.set_random_seed(worker)


def minus_sum(y_true, y_pred):
    return -keras.ops.sum(y_pred)


with strategy.scope():
    image, number = keras.layers.Input((64,)), keras.layers.Input((), dtype="int64")
    digit = keras.layers.Dense(10, "softmax", name="digit")(image)
    count = keras.layers.Embedding(SAMPLES, 1, embeddings_initializer="zeros", name="count")(number)
    model = keras.Model((image, number), (digit, count))
    model.compile(keras.optimizers.SGD(RATE), ("sparse_categorical_crossentropy", minus_sum))


def await_file(name):
    end = time.monotonic() + 60
    while not (folder / name).exists():
        assert time.monotonic() < end, f"{name} does not come"
        time.sleep(0.01)


class Meet(keras.callbacks.Callback):
    """Worker 1, or the chief, dies in its third step, behind its push; or both wait in theirs for the server."""

    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps != 3:
            return
        if dies == "server":
            print("HOLDS", flush=True)
            await_file("back")
        elif dies == "chief":
            if worker == 0 and not (folder / "died").exists():
                (folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
        elif worker == 1:
            (folder / "dies").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        else:
            await_file("dies")


given = (images[:SAMPLES], numbers[:SAMPLES]), (labels[:SAMPLES], labels[:SAMPLES])
if dies == "chief":  # a stream, equal each time that the chief's program runs
    data = tf.data.Dataset.from_tensor_slices(given).shuffle(SAMPLES, seed=1).batch(BATCH)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[Meet()])
else:
    model.fit(*given, epochs=EPOCHS, batch_size=BATCH, verbose=0, callbacks=[Meet()])
predictions = np.argmax(model.predict((images[SAMPLES:], 0 * numbers[SAMPLES:]), verbose=0)[0], 1)
(link,) = strategy.extended._links.values()
result = {
    "accuracy": float(np.mean(predictions == labels[SAMPLES:])),
    "pushes": link.session.pushes,
    "iterations": link.session.iterations,
    "counts": np.unique(model.get_layer("count").get_weights()[0] / RATE).tolist(),
}
print("RESULT", json.dumps(result), flush=True)
