"""What an epoch of `fit` and a call of `evaluate` cost beside their steps, with plain Keras and with tfdist.

The model and the data are so small that what is left is the price of an epoch: 4 steps of 8 samples. The median of
several epochs counts, of several rounds in turn.

    python benchmarks/epochs.py
"""

import itertools
import statistics
import sys
import time

import side_by_side

STEPS = 4
EPOCHS = 60


def measure(plain):
    import contextlib

    import keras
    import numpy as np

    if plain:
        size, rank, scope = 1, 0, contextlib.nullcontext()
    else:
        import tfdist

        strategy = tfdist.AllReduceStrategy()
        size, rank, scope = strategy.size, strategy.rank, strategy.scope()
    x = np.random.default_rng(0).normal(size=(8 * STEPS, 8)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with scope:
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    ends = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[clock])
    ends.clear()
    model.fit(x, y, batch_size=8, epochs=EPOCHS, verbose=0, callbacks=[clock])
    epochs = [after - before for before, after in itertools.pairwise(ends)]
    steps = []
    for _ in range(EPOCHS):
        begun = time.perf_counter()
        model.train_on_batch(x[:8], y[:8])
        steps.append(time.perf_counter() - begun)
    evaluations = []
    model.evaluate(x, y, batch_size=8, verbose=0)
    for _ in range(EPOCHS // 2):
        begun = time.perf_counter()
        model.evaluate(x, y, batch_size=8, verbose=0)
        evaluations.append(time.perf_counter() - begun)
    if rank == 0:
        side_by_side.report(
            {
                "processes": size,
                "epoch_ms": 1e3 * statistics.median(epochs),
                "evaluate_ms": 1e3 * statistics.median(evaluations),
                "train_on_batch_ms": 1e3 * statistics.median(steps),
            }
        )


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    command = [__file__, "--measure"]
    found = {"plain Keras": [], "tfdist, 1 process": [], "tfdist, 2 processes": []}
    for _ in range(options.rounds):
        found["plain Keras"].append(side_by_side.measure([__file__, "--measure-plain"], 1, cores=True))
        found["tfdist, 1 process"].append(side_by_side.measure(command, 1, cores=True))
        found["tfdist, 2 processes"].append(side_by_side.measure(command, 2, way="tfdist"))
    rows = []
    for name, rounds in found.items():
        for key in ("epoch_ms", "evaluate_ms", "train_on_batch_ms"):
            middle, least, most = side_by_side.median_and_spread([one[key] for one in rounds])
            rows.append((f"{name}: {key.removesuffix('_ms')}", {"median ms": middle, "least": least, "most": most}))
    side_by_side.table(rows, ["median ms", "least", "most"], f"{STEPS} steps an epoch")
    side_by_side.save(options.json, found)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(plain=False)
    elif "--measure-plain" in sys.argv:
        measure(plain=True)
    else:
        main()
