"""Scanned digits by asynchronous workers on parameter servers; see `tests/multiprocess/test_parameter_server.py`."""

import json
import os
import signal
import sys

import keras
import numpy as np
from sklearn.datasets import load_digits

from tfdist.parameter_server import (
    Asynchronous,
    BoundedStaleness,
    DelayCompensated,
    ElasticAveraging,
    Hogwild,
    LocalSteps,
    SoftSync,
    Synchronous,
)
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

MODES = {
    "asynchronous": {},
    "bounded": {"synchronization": BoundedStaleness(2)},
    "synchronous": {"synchronization": Synchronous()},
    "soft": {"synchronization": SoftSync(1)},
    "compensated": {"synchronization": Asynchronous(DelayCompensated(2.0, decay=0.95))},
    "local": {"pushes": LocalSteps(4)},
    "local-synchronous": {"pushes": LocalSteps(4), "synchronization": Synchronous()},
    "elastic": {"pushes": ElasticAveraging(4)},
    "hogwild": {"pushes": Hogwild()},
}
strategy = ParameterServerStrategy(**MODES[sys.argv[1]])
task = json.loads(os.environ["TF_CONFIG"])["task"]
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
worker = task["index"]
keras.utils.set_random_seed(worker)
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.Adam(2e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])


class Die(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if worker == 1 and str(epoch) == os.environ.get("TEST_DIE_AT_EPOCH"):
            os.kill(os.getpid(), signal.SIGKILL)


class Tell(keras.callbacks.Callback):
    def on_test_end(self, logs=None):
        control.publish("evaluated", "")


train, test = (images[worker:1400:2], labels[worker:1400:2]), (images[1400:], labels[1400:])
control = strategy.extended._servers.member.control
if task["type"] == "evaluator":
    history = model.fit(*train, validation_data=test, epochs=8, batch_size=32, verbose=0, callbacks=[Tell()])
    print("RESULT", json.dumps({"epoch": history.epoch, **history.history}), flush=True)
    sys.exit()
model.fit(*train, epochs=8, batch_size=32, verbose=0, callbacks=[Die()])
accuracy = model.evaluate(*test, verbose=0)[1]
(link,) = strategy.extended._links.values()
result = {
    "accuracy": accuracy,
    "steps": next(entry.counted for entry in link.report().workers if entry.number == worker),
    "iterations": int(model.optimizer.iterations),
    "norm": float(np.linalg.norm(model.get_weights()[0])),
}
print("RESULT", json.dumps(result), flush=True)
if "evaluator" in json.loads(os.environ["TF_CONFIG"])["cluster"]:
    control.look_up("evaluated")  # the job lasts until then
