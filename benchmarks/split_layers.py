"""Wide dense layers: whole on each process, split over all, and with weights in parts (`shard="weights"`).

A model of pairs of layers, as in a transformer's feed-forward blocks, is trained with Adam, in alternating rounds.
Printed are milliseconds of a step, megabytes that a process sends in a step, and the memory that making the model and
`fit` add to a process at its highest, of the process with most; and the ratios to those of whole layers.

    python benchmarks/split_layers.py
    python benchmarks/split_layers.py --batch 16
    python benchmarks/split_layers.py --torch-python python-with-pytorch  # beside its DDP and tensor parallelism
"""

import statistics
import sys
import time
from pathlib import Path

import sharded
import side_by_side

PAIRS = 4
PEERS = {"torch DDP": "ddp", "torch split": "split"}
KINDS = ("whole", "split", "split, gathered", "shard='weights'")


def layers(kind, width):
    import keras

    import tfdist

    if not kind.startswith("split"):
        return [keras.layers.Dense(4 * width, "relu"), keras.layers.Dense(width)]
    between = kind == "split"
    return [
        tfdist.layers.ColumnParallelDense(4 * width, "relu", gather_output=not between),
        tfdist.layers.RowParallelDense(width, input_is_parallel=between),
    ]


def measure(kind, width, steps, batch):
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    tfdist.init()
    mesh = tfdist.Mesh(model=tfdist.size()) if kind.startswith("split") else None
    strategy = tfdist.AllReduceStrategy(mesh=mesh, shard="weights" if kind.startswith("shard") else None)
    x = np.random.default_rng(0).normal(size=(batch * steps, width)).astype("float32")
    y = np.random.default_rng(1).integers(0, 10, len(x))
    before = sharded.memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    with strategy.scope():
        pairs = [layer for _ in range(PAIRS) for layer in layers(kind, width)]
        model = keras.Sequential([keras.layers.Input((width,)), *pairs, keras.layers.Dense(10)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=batch, verbose=0)
    added = sharded.memory("VmHWM") - before
    seconds, sent = [], strategy.communication()["bytes"]
    for _ in range(3):
        begun = time.perf_counter()
        model.fit(x, y, batch_size=batch, verbose=0)
        seconds.append(time.perf_counter() - begun)
    sent = (strategy.communication()["bytes"] - sent) / 3 / steps
    most = tfdist.all_reduce(tf.constant(float(added)), op="max")
    if strategy.rank == 0:
        side_by_side.report(
            {
                "ms a step": 1e3 * statistics.median(seconds) / steps,
                "MB sent in a step": sent / 1e6,
                "MB of memory": float(most) / 1e6,
                "MB of weights": model.count_params() * 4 / 1e6,
            }
        )


def bases_of(who):
    base = "torch DDP" if who in PEERS else "whole"
    return [base] if base != who else []


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, default=768, help="inputs of the pairs; they have 4 times as many units")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples of all processes together")
    parser.add_argument("--torch-python", help="an interpreter with PyTorch, for its own ways")
    options = parser.parse_args()
    figures = {who: [] for who in (*KINDS, *(PEERS if options.torch_python else ()))}
    for _ in range(options.rounds):
        for who, rounds in figures.items():
            print(f"{who} …", file=sys.stderr)
            sizes = [str(options.width), str(options.steps), str(options.batch)]
            if who in PEERS:
                command = [str(Path(__file__).with_name("split_layers_torch.py")), PEERS[who], *sizes]
                rounds.append(side_by_side.measure(command, options.processes, python=options.torch_python))
            else:
                rounds.append(side_by_side.measure([__file__, "--kind", who, *sizes], options.processes, way="tfdist"))
    title = f"{options.processes} processes, medians of {options.rounds} rounds"
    side_by_side.compare(figures, bases_of, title)
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--kind" in sys.argv:
        measure(sys.argv[-4], *map(int, sys.argv[-3:]))
    else:
        main()
