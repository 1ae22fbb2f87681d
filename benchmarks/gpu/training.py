"""Training on a GPU: the same weights as on the CPU, the speed of plain Keras, sums from the GPU's memory and back.

- *weights*: after 20 steps with SGD in float32 (no TF32), the largest difference of a weight: plain Keras and tfdist on
  the GPU against plain Keras on the CPU, and two processes that share the GPU against two on the CPU (as moments in
  BatchNormalization are of each share); with Dropout tfdist against plain Keras, both on the GPU.
- *speed*: samples per second, plain Keras and tfdist in one process, with XLA as Keras has it, and two processes that
  share the GPU, each half of every batch, with XLA and without. Ways alternate; the first epoch, in which functions are
  compiled, is not counted.
- *sums*: seconds of an in-graph all-reduce of tensors in the GPU's memory, two processes, whose memory on the host is
  locked or not; beside copies of the same vector to the host and back.
- *strategies*: other strategies on one GPU: whether they train, and end with equal weights.
- *scopes*: a model whose layers are on the GPU and on the CPU, against plain Keras on the CPU.

    python benchmarks/gpu/training.py

Needs a GPU, and TensorFlow that was built for it. ``--device CPU:0`` tries the script without one.
"""

import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

import side_by_side

WEIGHTS = ["mlp", "cnn", "text", "recurrent", "dropout"]
SPEED = {"mlp": 1024, "cnn": 512, "text": 256}
"""The global batch of each model."""
SUMS = [1, 16, 256]
"""Sizes of the summed tensors, in MiB."""
STEPS, REPEATS = 20, 10


def weights(way, device, names, file):
    """Trains each model for some steps, and writes all weights."""
    import keras
    import models
    import tensorflow as tf

    tf.config.experimental.enable_tensor_float_32_execution(False)
    trained, compiled = {}, {}
    for model in names:
        with _scope(way, device):
            made = models.compiled(model, keras.optimizers.SGD(0.01, momentum=0.9))
        x, y = models.data(model, 64 * STEPS)
        made.fit(x, y, batch_size=64, shuffle=False, verbose=0)
        trained[model] = np.concatenate([np.ravel(array) for array in made.get_weights()])
        compiled[model] = bool(made.jit_compile)
    if _rank(made) == 0:
        np.savez(file, **trained)
        side_by_side.report(compiled)


def speed(way, device, jit_compile, names):
    """Reports samples per second of an epoch of which everything is compiled, by model."""
    import models
    import tensorflow as tf

    rates, steps = {}, 60
    for model in names:
        batch = SPEED[model]
        with _scope(way, device):
            made = models.compiled(model, "adam", jit_compile)
        x, y = models.data(model, batch * 10)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch).cache().repeat().take(steps)
        data = data.apply(tf.data.experimental.assert_cardinality(steps)).prefetch(2)
        made.fit(data, verbose=0)
        seconds = []
        for _ in range(3):
            begun = time.perf_counter()
            made.fit(data, verbose=0)
            seconds.append(time.perf_counter() - begun)
        rates[model] = batch * steps / statistics.median(seconds)
    if _rank(made) == 0:
        side_by_side.report(rates)


def sums(device, locked):
    """Reports, by size, seconds of a sum over processes, of a copy to the host, and of one back."""
    import tensorflow as tf

    import tfdist
    from tfdist.comm.page_locks import page_locks

    tfdist.AllReduceStrategy(devices=[device])  # takes memory as needed
    if not locked:
        page_locks.device = None
    tfdist.init()
    figures = {}
    for size in SUMS:
        vector = np.ones(size << 18, np.float32)
        with tf.device(device):
            there = tf.identity(tf.constant(vector))

            @tf.function
            def summed(value):
                with tf.device(device):
                    return tf.reduce_max(tfdist.all_reduce(value * 1, op="sum"))

            rows = {"sum": _timed(lambda: float(summed(there)))}  # noqa: B023
            rows["to the host"] = _timed(lambda: there.numpy())  # noqa: B023
            rows["to the device"] = _timed(lambda: float(tf.identity(tf.constant(vector))[-1]))  # noqa: B023
        assert float(summed(there)) == tfdist.size()
        figures[f"{size} MiB"] = rows
    if tfdist.rank() == 0:
        side_by_side.report(figures)


def strategies(device):
    """Trains a small model in each strategy, and reports its accuracy and how far weights of ranks are apart."""
    import models

    import tfdist

    made_by = {
        "all-reduce": lambda: tfdist.AllReduceStrategy(devices=[device]),
        "compressed": lambda: tfdist.AllReduceStrategy(devices=[device], compression=tfdist.compression.TopK(0.1)),
        "delayed": lambda: tfdist.AllReduceStrategy(devices=[device], delay=1),
        "local SGD": lambda: tfdist.LocalSGDStrategy(devices=[device], sync_every=4),
        "gossip": lambda: tfdist.GossipStrategy(devices=[device]),
    }
    x, y = models.data("cnn", 256)
    figures = {}
    for way, make in made_by.items():
        with make().scope():
            made = models.compiled("cnn", "adam")
        made.fit(x, y, batch_size=32, epochs=8, verbose=0)
        tfdist.init()
        flat = np.concatenate([np.ravel(array) for array in made.get_weights()])
        first = tfdist.broadcast(flat, 0).numpy()
        apart = float(np.max(tfdist.all_gather([np.abs(flat - first).max()]).numpy()))
        accuracy = made.evaluate(x, y, verbose=0)[1]
        figures[way] = {"accuracy": accuracy, "apart": apart, "device": made.variables[0].value.device[-5:]}
    if tfdist.rank() == 0:
        side_by_side.report(figures)


def scopes(device):
    """Reports how far weights of a model on two devices are from those on the CPU."""
    import keras

    import tfdist

    x, y = np.random.default_rng(0).normal(size=(320, 8)).astype("float32"), np.ones((320, 1), "float32")
    ended = []
    for first, second in (("CPU:0", "CPU:0"), (device, "CPU:0"), ("CPU:0", device)):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((8,))
        with tfdist.device_scope(first):
            hidden = keras.layers.Dense(64, "tanh")(inputs)
        with tfdist.device_scope(second):
            outputs = keras.layers.Dense(1)(hidden)
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        ended.append(model.get_weights())
    apart = [max(float(np.abs(a - b).max()) for a, b in zip(arrays, ended[0], strict=True)) for arrays in ended[1:]]
    side_by_side.report(dict(zip(["GPU, then CPU", "CPU, then GPU"], apart, strict=True)))


def _scope(way, device):
    if way == "plain":
        return contextlib.nullcontext()
    import tfdist

    return tfdist.AllReduceStrategy(devices=[device]).scope()


def _rank(model):
    return getattr(model.distribute_strategy, "rank", 0)


def _timed(function):
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds[2:])


def launched(what, *given, processes=0):
    """What a measurement reports; without processes, in one of plain Keras."""
    command = [__file__, f"--measure={json.dumps([what, given])}"]
    visible = {"CUDA_VISIBLE_DEVICES": "0" if any("GPU" in str(setting) for setting in given) else "-1"}
    if processes:
        return side_by_side.measure(command, processes, visible, "tfdist", deadline=200)
    return side_by_side.measure(command, 1, visible, cores=False, deadline=200)


def measure_weights(device, names):
    ways = {  # what is run, and what it is compared with, also where random numbers are a GPU's own
        "CPU": ("plain", "CPU:0", 0, None, None),
        "plain Keras": ("plain", device, 0, "CPU", None),
        "tfdist": ("tfdist", device, 1, "CPU", "plain Keras"),
        "two on the CPU": ("tfdist", "CPU:0", 2, None, None),
        "two processes": ("tfdist", device, 2, "two on the CPU", None),
    }
    ended, differences = {}, {}
    for way, (kind, place, processes, reference, with_dropout) in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            compiled = launched("weights", kind, place, names, f"{folder}/weights.npz", processes=processes)
            ended[way] = dict(np.load(f"{folder}/weights.npz"))
        for model in names:
            other = with_dropout if model == "dropout" else reference
            if other is not None:
                apart = float(np.abs(ended[way][model] - ended[other][model]).max())
                text = f"{apart:.1e} from {other}{', XLA' if compiled[model] else ''}"
                print(f"weights, {model:10} {way:14}: {text}", flush=True)
                differences[f"{model}, {way}"] = apart
    return differences


def measure_speed(device, rounds, names):
    ways = {
        "plain Keras": ("plain", "auto", 0),
        "tfdist": ("tfdist", "auto", 1),
        "two processes": ("tfdist", "auto", 2),
        "two without XLA": ("tfdist", False, 2),
    }
    rates = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (kind, jit_compile, processes) in ways.items():
            rates[way].append(launched("speed", kind, device, jit_compile, names, processes=processes))
            print(f"speed, {way}: {rates[way][-1]}", flush=True)
    for model in names:
        plain = [reading[model] for reading in rates["plain Keras"]]
        for way, readings in rates.items():
            values = [reading[model] for reading in readings]
            ratios = [a / b for a, b in zip(values, plain, strict=True)]
            print(
                f"speed, {model:5} {way:15}: {statistics.median(values):9.0f} samples/s, "
                f"{statistics.median(ratios):.2f} × plain Keras ({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    return rates


def measure_sums(device):
    figures = {}
    for way, locked in {"locked": True, "not locked": False}.items():
        figures[way] = launched("sums", device, locked, processes=2)
        for size, rows in figures[way].items():
            text = ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in rows.items())
            line = rows["to the host"] + rows["to the device"]
            share = line / rows["sum"]
            print(f"sums, {way:10} {size:>7}: {text}; copies alone take {share:.2f} of the sum's time", flush=True)
    return figures


def measure_strategies(device):
    figures = launched("strategies", device, processes=2)
    for way, row in figures.items():
        print(f"strategies, {way:11}: {row}", flush=True)
    return figures


def measure_scopes(device):
    figures = launched("scopes", device)
    print(f"scopes: {figures}", flush=True)
    return figures


def main():
    options = side_by_side.parser(__doc__.partition("\n")[0])
    parts = {
        "weights": lambda device: measure_weights(device, [model for model in WEIGHTS if model in options.models]),
        "speed": lambda device: measure_speed(
            device, options.rounds, [model for model in SPEED if model in options.models]
        ),
        "sums": measure_sums,
        "strategies": measure_strategies,
        "scopes": measure_scopes,
    }
    options.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    options.add_argument("--rounds", type=int, default=2)
    options.add_argument("--models", nargs="+", choices=WEIGHTS, default=WEIGHTS, help="of weights and speed")
    options.add_argument("--device", default="GPU:0")
    options = options.parse_args()
    results = {}
    for part in options.only:
        try:
            results[part] = parts[part](options.device)
        except Exception as error:  # the others are measured all the same
            results[part] = f"failed: {error}"
            print(f"{part} failed: {str(error)[-3000:]}", flush=True)
    side_by_side.save(options.json, results)


if __name__ == "__main__":
    asked = next((argument.partition("=")[2] for argument in sys.argv if argument.startswith("--measure=")), None)
    if asked is None:
        main()
    else:
        what, given = json.loads(asked)
        globals()[what](*given)
