"""Dense layers by all-reduce, embeddings on parameter servers, and how it ends where a task is killed.

Compared with plain Keras in rank 0's process, whose embedding has dense gradients and the same initial rows; see
`tests/multiprocess/test_embeddings_beside_all_reduce.py`. The arguments are a folder, and ``compare``, ``train`` (until
it is killed) or both.
"""

import json
import sys

import keras
import numpy as np

import tfdist

KEYS, DIM, SAMPLES = 20, 4, 50
INITIAL = tfdist.layers.InitialRows("normal", 0.5, seed=3)
generator = np.random.default_rng(0)
names = np.sort(generator.integers(-(2**63), 2**63 - 1, KEYS))
places = generator.integers(0, KEYS, (SAMPLES, 5))
x, y = names[places], np.sin(places[:, :1]).astype("float32")
folder = sys.argv[1]

strategy = tfdist.AllReduceStrategy()  # on a parameter server, this serves and ends the process
tfdist.init()


class OneHot(keras.layers.Embedding):
    """Has dense gradients."""

    def call(self, inputs):
        return keras.ops.matmul(keras.ops.one_hot(inputs, KEYS), self.embeddings)


def made(embedding):
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Input((5,), dtype="int64"),
        embedding,
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(8, "tanh"),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.3), "mse", metrics=["mae"])
    return model


def fit(model, keys, epochs=3):
    """Batches of 17, 17 and 16 samples: the two ranks' shares are unequal."""
    given = {"batch_size": 17, "shuffle": False, "verbose": 0}
    return model.fit(keys, y, epochs=epochs, validation_data=(keys[:7], y[:7]), **given).history


def difference(actual, expected):
    actual, expected = (np.concatenate([np.ravel(part) for part in parts]) for parts in (actual, expected))
    return float(np.abs(actual - expected).max() / np.abs(expected).max())


def compare():
    """Whether this job ends where one process does."""
    history = fit(model, x)
    results = model.evaluate(x, y, batch_size=17, verbose=0)
    predictions = model.predict(x, batch_size=7, verbose=0)
    keys, rows = embedding.export()
    path = f"{folder}/model.keras"
    model.save(path)
    with strategy.scope():
        again = keras.models.load_model(path)
    loaded = again.predict(x, verbose=0)
    fit(again, x, epochs=1)

    weights = model.get_weights()
    everyone = [tfdist.all_gather(weight.reshape(1, -1)) for weight in weights if weight.size]
    report = {"ranks": max(float(np.ptp(parts, axis=0).max()) for parts in everyone)}
    if strategy.rank == 0:
        plain = OneHot(KEYS, DIM)
        expected = made(plain)
        plain.set_weights([INITIAL.rows(names, DIM, np.dtype(np.float32))])
        of_plain = fit(expected, places)
        report |= {
            "keys": bool(np.array_equal(keys, np.unique(x))),
            "rows": difference([rows], [plain.get_weights()[0][np.unique(places)]]),
            "weights": difference(weights[1:], expected.get_weights()[1:]),
            "history": max(difference([history[name]], [values]) for name, values in of_plain.items()),
            "evaluate": difference([results], [expected.evaluate(places, y, verbose=0)]),
            "predict": difference([predictions], [expected.predict(places, verbose=0)]),
            "loaded": difference([loaded], [predictions]),
        }
        fit(expected, places, epochs=1)
        report["after loading"] = difference([again.predict_on_batch(x)], [expected.predict_on_batch(places)])
    print("RESULT", json.dumps(report), flush=True)


class Ready(keras.callbacks.Callback):
    """Says that training is under way."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            print("READY", flush=True)


with strategy.scope():
    embedding = tfdist.layers.DynamicEmbedding(DIM, INITIAL, name="rows")
    model = made(embedding)
if "compare" in sys.argv:
    compare()
if "train" in sys.argv:
    try:
        model.fit(x, y, epochs=10**6, verbose=0, callbacks=[Ready()])
    except tfdist.TfdistError as error:
        print("ERROR", type(error).__name__, error, flush=True)
        raise
