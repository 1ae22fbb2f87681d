"""Steps and memory of `AllReduceStrategy`, with and without an optimizer that is divided among the processes.

Two models are trained with Adam, in alternating rounds: a perceptron of layers of equal sizes, and one of which a
single layer has most weights, which cannot be dealt evenly as a whole. Printed are milliseconds of a step and their
ratio, and the memory that `fit` adds to a process (anonymous and shared, at its highest), of the process with most.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --processes 4 --width 2048
"""

import statistics
import sys
import time

import side_by_side

BATCH = 64


def models(width):
    import keras

    return {
        "equal layers": [*(keras.layers.Dense(width, activation="relu") for _ in range(4)), keras.layers.Dense(10)],
        "one large layer": [keras.layers.Dense(4 * width, activation="relu"), keras.layers.Dense(10)],
    }


def measure(shard, width, steps):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    tfdist.init()
    strategy = tfdist.AllReduceStrategy(shard=shard)
    x = np.random.default_rng(0).normal(size=(BATCH * steps, width)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, len(x))
    figures = {"processes": strategy.size}
    for name in models(1):
        before = resident()
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((width,)), *models(width)[name]])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        peaks, seconds = [], []
        memory = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, peaks=peaks: peaks.append(resident())
        )
        model.fit(x, y, batch_size=BATCH, verbose=0, callbacks=[memory])
        for _ in range(3):
            begun = time.perf_counter()
            model.fit(x, y, batch_size=BATCH, verbose=0)
            seconds.append(time.perf_counter() - begun)
        most = tfdist.all_reduce(tf.constant(float(max(peaks) - before)), op="max")
        weights = sum(int(np.prod(weight.shape)) for weight in model.weights) * 4 / 1e6
        figures[f"{name} ({weights:.0f} MB): ms a step"] = 1e3 * statistics.median(seconds) / steps
        figures[f"{name} ({weights:.0f} MB): MB of memory"] = float(most) / 1e6
        del model
    if strategy.rank == 0:
        side_by_side.report(figures)


def resident():
    """Returns this process's resident memory without files, in bytes."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="inputs and units of the layers")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    figures = {"whole": [], "shard='optimizer'": []}
    for _ in range(options.rounds):
        for (who, rounds), flag in zip(figures.items(), ("--whole", "--optimizer"), strict=True):
            command = [__file__, flag, str(options.width), str(options.steps)]
            print(f"{who} …", file=sys.stderr)
            rounds.append(side_by_side.measure(command, options.processes, way="tfdist"))
    rows = []
    for name in figures["whole"][0]:
        if name != "processes":
            medians = {who: statistics.median(reading[name] for reading in rounds) for who, rounds in figures.items()}
            pairs = zip(*figures.values(), strict=True)
            ratios = [divided[name] / whole[name] for whole, divided in pairs]
            rows.append(
                (f"{name} (ratio {statistics.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f})", medians)
            )
    side_by_side.table(rows, list(figures), f"{options.processes} processes, medians of {options.rounds} rounds")
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--whole" in sys.argv or "--optimizer" in sys.argv:
        measure(None if "--whole" in sys.argv else "optimizer", *map(int, sys.argv[-2:]))
    else:
        main()
