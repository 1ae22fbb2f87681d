"""`fit` of a 5.8 M-parameter MLP, batch 128 per worker: two processes with one core each against one on one core.

The two are measured alternately, so that other load on the machine affects both; the result is the median of the
pairs' ratios.

    python benchmarks/fit.py
"""

import sys
import time

import side_by_side

SAMPLES = 16384
BATCH = 128


def measure():
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.AllReduceStrategy()
    keras.utils.set_random_seed(0)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(SAMPLES, 784)).astype("float32")
    y = generator.integers(0, 10, SAMPLES)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((784,)),
                keras.layers.Dense(2048, activation="relu"),
                keras.layers.Dense(2048, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH * strategy.size)
    model.fit(data, epochs=1, verbose=0)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        model.fit(data, epochs=1, verbose=0)
        seconds.append(time.perf_counter() - begun)
    if strategy.rank == 0:
        side_by_side.report({"samples_per_s": SAMPLES / min(seconds)})


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    options = parser.parse_args()
    command = [__file__, "--measure"]
    pairs = []
    for _ in range(options.pairs):
        single = side_by_side.measure(command, 1, {"TF_NUM_INTRAOP_THREADS": "1"}, cores=True)["samples_per_s"]
        many = side_by_side.measure(command, options.processes, way="tfdist")["samples_per_s"]
        pairs.append((single, many))
        print(
            f"one process {single:6.0f}, {options.processes} processes {many:6.0f} samples/s: {many / single:.2f} ×",
            flush=True,
        )
    middle, least, most = side_by_side.median_and_spread([many / single for single, many in pairs])
    print(f"median {middle:.2f} × (from {least:.2f} to {most:.2f})")
    side_by_side.save(options.json, {"pairs": pairs, "median": middle})


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    else:
        main()
