"""The workers' script of a job whose parameter servers have none; see `tests/multiprocess/test_serve.py`."""

import json
import os
import sys

import keras
from own_optimizer import Halved
from sklearn.datasets import load_digits

from tfdist import compression
from tfdist.parameter_server import BoundedStaleness, Gradients, Servers
from tfdist.strategies.servers.parameter_server import ParameterServerStrategy

keras.config.set_floatx("float64")
strategy = ParameterServerStrategy(
    synchronization=BoundedStaleness(2),
    pushes=Gradients(compression=compression.Int8()),
    servers=Servers(snapshots=sys.argv[1], snapshot_seconds=0.5),
)
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype("float32")
keras.utils.set_random_seed(worker)
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(Halved(4e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(images[worker:1400:2], labels[worker:1400:2], epochs=8, batch_size=32, verbose=0)
accuracy = model.evaluate(images[1400:], labels[1400:], verbose=0)[1]
(link,) = strategy.extended._links.values()
result = {"accuracy": accuracy, "pushes": link.session.pushes, "iterations": link.session.iterations}
print("RESULT", json.dumps(result), flush=True)
