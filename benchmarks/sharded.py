"""Steps and memory of `AllReduceStrategy`: whole, with a divided optimizer, also with compressed gradients, and
with divided weights.

Two models are trained with Adam, in alternating rounds: a perceptron of layers of equal sizes, and one of which a
single layer has most weights. Printed are milliseconds of a step, megabytes that a process sends in a step, and the
memory that making the model and `fit` add to a process at its highest (anonymous and shared), of the process with most;
and their ratios to those without ``shard=``.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --processes 4 --width 2048
    python benchmarks/sharded.py --torch-python python-with-pytorch  # beside DistributedDataParallel and fully_shard
"""

import gc
import statistics
import sys
import time
from pathlib import Path

import side_by_side

BATCH, LAYERS = 64, 12
PEERS = {"torch DDP": "ddp", "torch fully_shard": "fully_shard"}
KINDS = {
    "whole": {},
    "shard='optimizer'": {"shard": "optimizer"},
    "shard='optimizer', Int8": {"shard": "optimizer", "compression": "Int8"},
    "shard='weights'": {"shard": "weights"},
    "gather='model'": {"shard": "weights", "gather": "model"},
}


def models(width):
    import keras

    return {
        "equal layers": [
            *(keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)),
            keras.layers.Dense(10),
        ],
        "one large layer": [keras.layers.Dense(4 * width, activation="relu"), keras.layers.Dense(10)],
    }


def measure(arguments, width, steps):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    tfdist.init()
    method = arguments.get("compression")
    compression = getattr(tfdist.compression, method)() if method else None
    strategy = tfdist.AllReduceStrategy(**{**arguments, "compression": compression})
    x = np.random.default_rng(0).normal(size=(BATCH * steps, width)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, len(x))
    figures = {}
    for name in models(1):
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
        with strategy.scope():
            model = keras.Sequential([keras.layers.Input((width,)), *models(width)[name]])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, batch_size=BATCH, verbose=0)
        added = memory("VmHWM") - before
        seconds, sent = [], strategy.communication()["bytes"]
        for _ in range(3):
            begun = time.perf_counter()
            model.fit(x, y, batch_size=BATCH, verbose=0)
            seconds.append(time.perf_counter() - begun)
        sent = (strategy.communication()["bytes"] - sent) / 3 / steps
        most = tfdist.all_reduce(tf.constant(float(added)), op="max")
        weights = model.count_params() * 4 / 1e6
        figures[f"{name} ({weights:.0f} MB): ms a step"] = 1e3 * statistics.median(seconds) / steps
        figures[f"{name} ({weights:.0f} MB): MB sent in a step"] = sent / 1e6
        figures[f"{name} ({weights:.0f} MB): MB of memory"] = float(most) / 1e6
        del model
        keras.backend.clear_session()
        gc.collect()
    if strategy.rank == 0:
        side_by_side.report(figures)


def memory(kind):
    """Returns this process's memory without files, in bytes; those are the same before and after."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return (int(lines[kind].split()[0]) - int(lines["RssFile"].split()[0])) * 1024


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024, help="inputs and units of the layers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--torch-python", help="an interpreter with PyTorch, for its own ways")
    options = parser.parse_args()
    figures = {who: [] for who in (*KINDS, *(PEERS if options.torch_python else ()))}
    for _ in range(options.rounds):
        for who, rounds in figures.items():
            print(f"{who} …", file=sys.stderr)
            sizes = [str(options.width), str(options.steps)]
            if who in PEERS:
                command = [str(Path(__file__).with_name("sharded_torch.py")), PEERS[who], *sizes]
                rounds.append(side_by_side.measure(command, options.processes, python=options.torch_python))
            else:
                command = [__file__, "--kind", who, *sizes]
                rounds.append(side_by_side.measure(command, options.processes, way="tfdist"))
    title = f"{options.processes} processes, medians of {options.rounds} rounds"
    side_by_side.compare(figures, lambda who: "torch DDP" if who == "torch fully_shard" else "whole", title)
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--kind" in sys.argv:
        who, width, steps = sys.argv[-3:]
        measure(KINDS[who], int(width), int(steps))
    else:
        main()
