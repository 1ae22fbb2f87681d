"""Steps and memory of `AllReduceStrategy`: whole, with a divided optimizer, also with compressed gradients, and
with divided weights.

Three models are trained with Adam: a perceptron of layers of equal sizes, one of which a single layer has most weights,
and the transformer of `peers.py`, by default so wide that every kernel within its blocks is cut. Ways alternate in each
round, each in processes of its own. Where there are enough cores, each process is pinned to one.

Printed are milliseconds of a step, megabytes that a process sends in a step, and the memory that making the model and
`fit` add to a process at its highest (anonymous and shared), of the process with most; and the rounds' ratios.

    python benchmarks/sharded.py
    python benchmarks/sharded.py --model transformer
    python benchmarks/sharded.py --processes 4 --model "equal layers" --width 2048
    python benchmarks/sharded.py --torch-python python-with-pytorch  # beside DistributedDataParallel and fully_shard
"""

import statistics
import sys
import time
from pathlib import Path

import peers
import side_by_side

LAYERS = 12
WIDTH = {"equal layers": 1024, "one large layer": 1024, "transformer": 320}
BATCH = {"equal layers": 64, "one large layer": 64, "transformer": 32}
STEPS = {"equal layers": 20, "one large layer": 20, "transformer": 4}
EPOCHS = 4
"""Number of epochs, of which the first is not counted."""
PEERS = {"torch DDP": "ddp", "torch fully_shard": "fully_shard"}
KINDS = {
    "whole": {},
    "shard='optimizer'": {"shard": "optimizer"},
    "shard='optimizer', Int8": {"shard": "optimizer", "compression": "Int8"},
    "shard='weights'": {"shard": "weights"},
    "gather='model'": {"shard": "weights", "gather": "model"},
}
BASES = {
    **{who: ["whole"] for who in KINDS if who != "whole"},
    "torch DDP": ["whole"],
    "torch fully_shard": ["torch DDP", "shard='weights'", "gather='model'"],
}
"""With what each way is compared."""


def model_of(name, width):
    import keras

    if name == "transformer":
        return peers.model_of("text", width)
    if name == "equal layers":
        hidden = [keras.layers.Dense(width, activation="relu") for _ in range(LAYERS)]
    else:
        hidden = [keras.layers.Dense(4 * width, activation="relu")]
    return keras.Sequential([keras.layers.Input((width,)), *hidden, keras.layers.Dense(10)])


def data(name, width, samples):
    """Random inputs and labels."""
    import numpy as np

    if name == "transformer":
        return peers.data("text", samples)
    generator = np.random.default_rng(0)
    return generator.normal(size=(samples, width)).astype("float32"), generator.integers(0, 10, samples)


def measure(kind, name, width, batch, steps):
    import keras
    import tensorflow as tf

    import tfdist

    tfdist.init()
    arguments = KINDS[kind]
    method = arguments.get("compression")
    compression = getattr(tfdist.compression, method)() if method else None
    strategy = tfdist.AllReduceStrategy(**{**arguments, "compression": compression})
    x, y = data(name, width, batch * steps)
    before = memory("VmRSS")
    forget_highest()
    with strategy.scope():
        model = model_of(name, width)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=batch, verbose=0)
    added = memory("VmHWM") - before
    seconds, sent = [], strategy.communication()["bytes"]
    for _ in range(EPOCHS - 1):
        begun = time.perf_counter()
        model.fit(x, y, batch_size=batch, verbose=0)
        seconds.append(time.perf_counter() - begun)
    sent = (strategy.communication()["bytes"] - sent) / (EPOCHS - 1) / steps
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


def memory(kind):
    """Returns this process's memory without files, in bytes; those are the same before and after."""
    with open("/proc/self/status") as status:
        lines = dict(line.split(":", 1) for line in status)
    return (int(lines[kind].split()[0]) - int(lines["RssFile"].split()[0])) * 1024


def forget_highest():
    """Begins anew with ``VmHWM``, this process's memory at its highest."""
    Path("/proc/self/clear_refs").write_text("5")


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--model", nargs="+", choices=WIDTH, default=list(WIDTH))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--width", type=int, help=f"inputs and units of layers, or of embeddings: {WIDTH}")
    parser.add_argument("--batch", type=int, help=f"samples of all processes together: {BATCH}")
    parser.add_argument("--steps", type=int, help=f"steps of each of {EPOCHS} epochs: {STEPS}")
    parser.add_argument("--torch-python", help="an interpreter with PyTorch, for its own ways")
    options = parser.parse_args()
    measured = {}
    for name in options.model:
        sizes = [options.width or WIDTH[name], options.batch or BATCH[name], options.steps or STEPS[name]]
        figures = measured[name] = {who: [] for who in (*KINDS, *(PEERS if options.torch_python else ()))}
        for _ in range(options.rounds):
            for who, rounds in figures.items():
                print(f"{name}, {who} …", file=sys.stderr)
                rounds.append(one_round(who, [name, *map(str, sizes)], options.processes, options.torch_python))
        title = f"{name}, {options.processes} processes, medians of {options.rounds} rounds"
        side_by_side.compare(figures, lambda who: BASES.get(who, []), title)
        side_by_side.save(options.json, measured)


def one_round(who, case, processes, torch_python):
    if who in PEERS:
        command = [str(Path(__file__).with_name("sharded_torch.py")), PEERS[who], *case]
        return side_by_side.measure(command, processes, {"OMP_NUM_THREADS": "1"}, python=torch_python)
    return side_by_side.measure([__file__, "--kind", who, *case], processes, way="tfdist")


if __name__ == "__main__":
    if "--kind" in sys.argv:
        measure(*sys.argv[-5:-3], *map(int, sys.argv[-3:]))
    else:
        main()
