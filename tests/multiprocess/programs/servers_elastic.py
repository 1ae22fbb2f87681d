"""Digits, with workers that the cluster does not name; see `tests/multiprocess/test_elastic.py`."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
from sklearn.datasets import load_digits

from tfdist.parameter_server import BoundedStaleness
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

folder = Path(sys.argv[1])
strategy = ParameterServerStrategy(synchronization=BoundedStaleness(2))
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
keras.utils.set_random_seed(worker)
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])


class Meet(keras.callbacks.Callback):
    """Named workers stay in their first epoch until the others have begun theirs; worker 7 dies after its own.

    They stay after their first batch: one that begins late may be two batches ahead of the other, and no more.
    """

    def on_epoch_begin(self, epoch, logs=None):
        (folder / f"worker {worker} epoch {epoch}").touch()
        if worker == 7 and epoch == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, batch, logs=None):
        if worker < 2 and batch == 0:
            print("HOLDS", flush=True)
            end = time.monotonic() + 100
            while not all((folder / f"worker {other} epoch 0").exists() for other in (5, 7)):
                assert time.monotonic() < end, "the others do not come"
                time.sleep(0.01)


model.fit(images[worker % 2 : 1400 : 2], labels[worker % 2 : 1400 : 2], 32, 6, verbose=0, callbacks=[Meet()])
accuracy = model.evaluate(images[1400:], labels[1400:], verbose=0)[1]
(link,) = strategy.extended.links(model)
report = link.report()
result = {
    "accuracy": accuracy,
    "pushes": link.session.pushes,
    "iterations": link.session.iterations,
    "counted": {entry.number: entry.counted for entry in report.workers},
}
print("RESULT", json.dumps(result), flush=True)
