"""A `PyDataset`, a generator and `from_generator` that yield views of the user's arrays, which must not change."""

import keras
import numpy as np
import tensorflow as tf
from common import strategy, weights
from keras import layers

scope = strategy()
rng = np.random.default_rng(5)


def aligned(array):
    """Copied to a 64-byte boundary: memory that TensorFlow takes without copying it."""
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    placed = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[:] = array
    return placed


x, y = aligned(rng.normal(size=(128, 8))), aligned(rng.normal(size=(128, 1)))
kept = x.copy(), y.copy()


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        part = slice(index * 32, (index + 1) * 32)
        return x[part], y[part]


def forever():
    while True:
        for start in range(0, 128, 32):
            yield x[start : start + 32], y[start : start + 32]


def once():
    for start in range(0, 128, 32):
        yield x[start : start + 32], y[start : start + 32]


specs = (tf.TensorSpec((None, 8), "float64"), tf.TensorSpec((None, 1), "float64"))
sources = {
    "pydataset": (lambda: Batches(), {}),
    "threads": (lambda: Batches(workers=2), {}),
    "generator": (forever, {"steps_per_epoch": 4}),
    "from_generator": (lambda: tf.data.Dataset.from_generator(once, output_signature=specs), {}),
}
results = {}
with scope.scope():
    model = keras.Sequential([layers.Input((8,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
for name, (source, arguments) in sources.items():
    history = model.fit(source(), epochs=2, shuffle=False, verbose=0, **arguments)
    results[name] = {"weights": weights(model), "history": history.history}
results["untouched"] = [np.array_equal(x, kept[0]), np.array_equal(y, kept[1])]
results["outputs"] = model.predict(Batches(), verbose=0)
