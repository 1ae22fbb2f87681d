"""A recommender of hashed users and items, on parameter servers; see `tests/multiprocess/test_dynamic_embedding.py`.

Workers keep rows of items. With a folder, servers write snapshots to it, and workers wait for a file in it before the
fourth epoch.
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np

import tfdist
from tfdist.parameter_server import Servers

folder = Path(sys.argv[1]) if sys.argv[1:] else None
kept = Servers(snapshots=folder / "snapshots", snapshot_seconds=0.2) if folder else Servers()
strategy = tfdist.ParameterServerStrategy(servers=kept)
task = json.loads(os.environ["TF_CONFIG"])["task"]
worker = task["index"]
generator = np.random.default_rng(0)
USERS, ITEMS, TASTES = generator.integers(-(2**63), 2**63 - 1, 60), generator.integers(-(2**63), 2**63 - 1, 80), 3
likes = generator.normal(size=(60, TASTES)) @ generator.normal(size=(TASTES, 80)) > 0
pairs = np.stack(np.meshgrid(np.arange(60), np.arange(80), indexing="ij"), -1).reshape(-1, 2)
pairs = generator.permutation(pairs)
train, test = pairs[:4000], pairs[4000:]


def batch_of(rows):
    return [USERS[rows[:, 0]], ITEMS[rows[:, 1]]], likes[rows[:, 0], rows[:, 1]].astype("float32")


keras.utils.set_random_seed(0)
with strategy.scope():
    inputs = [keras.layers.Input((), dtype="int64") for _ in range(2)]
    layers = [
        tfdist.layers.DynamicEmbedding(8, tfdist.layers.InitialRows(scale=0.5, seed=seed), name=name, cache=cache)
        for seed, name, cache in ((0, "users", None), (1, "items", tfdist.layers.CachePolicy(60, 2)))
    ]
    vectors = [layer(keys) for layer, keys in zip(layers, inputs, strict=True)]
    joined = keras.layers.Concatenate()([*vectors, keras.layers.Multiply()(vectors)])
    score = keras.layers.Dense(1, "sigmoid")(joined)
    model = keras.Model(inputs, score)
    model.compile(keras.optimizers.Adam(0.04), "binary_crossentropy", metrics=["accuracy"])


class Waits(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        print("EPOCH", epoch, flush=True)
        end = time.monotonic() + 120
        while folder and epoch == 3 and not (folder / "go").exists():
            assert time.monotonic() < end
            time.sleep(0.01)


local_pairs = train[worker::2]
model.fit(*batch_of(local_pairs), batch_size=100, epochs=6, verbose=0, callbacks=[Waits()])
accuracy = model.evaluate(*batch_of(test), verbose=0)[1]
model.predict([np.arange(100), np.arange(100)], verbose=0)
exported = [layer.export() for layer in layers]
(link,) = strategy.extended._links.values()
result = {
    "accuracy": accuracy,
    "steps": link.session.pushes,
    "kept": layers[1]._rows.table.cache.found / layers[1]._rows.table.cache.asked,
    "users": [len(exported[0][0]), bool(np.isin(USERS[local_pairs[:, 0]], exported[0][0]).all())],
    "items": [len(exported[1][0]), bool(np.isin(ITEMS[local_pairs[:, 1]], exported[1][0]).all())],
}
print("RESULT", json.dumps(result), flush=True)
