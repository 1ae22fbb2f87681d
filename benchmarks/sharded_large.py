"""The peak memory of a model of 250 million parameters with Adam, on one process and in parts on several.

Printed is, after making the model, `fit`, `evaluate`, `save_weights` and `save`, the highest memory so far of the
process with most (VmHWM: with Python, TensorFlow and the files that they map), in MiB: plain Keras on one process, and
`AllReduceStrategy(shard="weights")`. Equal layers, each of 5 % of the parameters; batches of 32.

    python benchmarks/sharded_large.py
    python benchmarks/sharded_large.py --processes 2 --width 2500
"""

import os
import sys
import tempfile

import side_by_side

BATCH, LAYERS, STEPS = 32, 20, 3


def highest():
    """Returns the highest memory of this process so far, in MiB."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def measure(who, width, folder):
    import contextlib

    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    scope, figures = contextlib.nullcontext(), {}
    if who != "plain Keras":
        tfdist.init()
        scope = tfdist.AllReduceStrategy(shard="weights").scope()

    def note(name):
        most = highest()
        figures[name] = most if who == "plain Keras" else float(tfdist.all_reduce(tf.constant(most), op="max"))

    keras.utils.set_random_seed(0)
    with scope:
        hidden = [keras.layers.Dense(width, activation="tanh") for _ in range(LAYERS)]
        model = keras.Sequential([keras.layers.Input((64,)), keras.layers.Dense(width), *hidden, keras.layers.Dense(8)])
        model.compile("adam", "mse", jit_compile=False)
    note(f"made, {model.count_params() / 1e6:.0f} M parameters")
    x = np.random.default_rng(0).normal(size=(BATCH * STEPS, 64)).astype("float32")
    losses = model.fit(x, x[:, :8], batch_size=BATCH, shuffle=False, verbose=0).history["loss"]
    note("fit")
    model.evaluate(x, x[:, :8], batch_size=BATCH, verbose=0)
    note("evaluate")
    for name in ("model.weights.h5", "model.keras"):
        path = os.path.join(folder, name)
        model.save_weights(path) if name.endswith("h5") else model.save(path)
        note(f"saved as {name}")
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)
    figures["loss"] = losses[0]
    if who == "plain Keras" or tfdist.rank() == 0:
        side_by_side.report(figures)


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--width", type=int, default=3536, help="units of each layer")
    options = parser.parse_args()
    figures = {}
    for who, processes in (("plain Keras", 1), ("shard='weights'", options.processes)):
        print(f"{who} …", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            command = [__file__, "--kind", who, str(options.width), folder]
            figures[who] = side_by_side.measure(command, processes, way="tfdist")
    rows = [(name, {who: reading[name] for who, reading in figures.items()}) for name in figures["plain Keras"]]
    side_by_side.table(rows, list(figures), f"MiB of the process with most, {options.processes} processes")
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--kind" in sys.argv:
        who, width, folder = sys.argv[-3:]
        measure(who, int(width), folder)
    else:
        main()
