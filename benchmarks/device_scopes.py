"""Two branches on two devices against one, and the times that a partition predicts against those of its stages.

- *branches*: a model of two towers. On one core; with one device on all cores; each tower on a device of its own. On a
  CPU the devices share TensorFlow's threads, of which each operation gets one here.
- *stages*: `tfdist.partition` predicts the seconds of each stage; the stages are then measured again, in another
  process.

    python benchmarks/device_scopes.py
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time

import side_by_side

ONE_CORE, ONE, TWO = "one core", "one device", "two devices"
STAGES = 3


def make_towers(devices):
    import keras

    import tfdist

    inputs = [keras.Input((512,)), keras.Input((512,))]
    outputs = []
    for device, hidden in zip(devices, inputs, strict=True):
        with tfdist.device_scope(device):
            for _ in range(4):
                hidden = keras.layers.Dense(512, "relu")(hidden)
            outputs.append(hidden)
    with tfdist.device_scope("CPU:0"):
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Add()(outputs)))
    model.compile("sgd", "mse")
    return model


def make_network():
    import keras

    layers = [keras.Input((32, 32, 3))]
    for filters in (16, 32, 32, 64, 64):
        layers += [keras.layers.Conv2D(filters, 3, padding="same"), keras.layers.BatchNormalization()]
        layers += [keras.layers.Activation("relu")]
        if filters != 16:
            layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.Flatten(), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def branches(kind, steps):
    """Steps per second; in a process with threads for two operations at a time."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    import numpy as np

    model = make_towers(["CPU:0", "CPU:1"] if kind == TWO else ["CPU:0", "CPU:0"])
    x = [np.random.default_rng(seed).normal(size=(256, 512)).astype("float32") for seed in range(2)]
    data = tf.data.Dataset.from_tensors((tuple(x), x[0][:, :1])).repeat()
    model.fit(data, steps_per_epoch=5, verbose=0)
    rates = []
    for _ in range(5):
        begin = time.perf_counter()
        model.fit(data, steps_per_epoch=steps, verbose=0)
        rates.append(steps / (time.perf_counter() - begin))
    return {"rate": statistics.median(rates)}


def plan():
    """The stages' calls, and their seconds as predicted."""
    import tfdist

    partition = tfdist.partition(make_network(), stages=STAGES, verbose=False)
    return {
        "calls": [len(stage.calls) for stage in partition.stages],
        "seconds": [stage.cost for stage in partition.stages],
    }


def again(counts):
    """The seconds of stages with so many calls."""
    from tfdist.model_parallel.model_calls import ModelCalls
    from tfdist.model_parallel.stage_times import seconds_of

    calls = ModelCalls(make_network())
    ends = list(itertools.accumulate(counts))
    ranges = zip([0, *ends], ends, strict=False)
    return {"seconds": [seconds_of(calls, begin, end, 32) for begin, end in ranges]}


def child(*arguments, one_core=False):
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    prefix = ["taskset", "-c", "0"] if one_core else []
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    ended = subprocess.run([*prefix, *command], env=env, capture_output=True, text=True, timeout=600, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="of a reading")
    options = parser.parse_args()
    rates = {name: [] for name in (ONE_CORE, ONE, TWO)}
    ratios = []
    for _ in range(options.rounds):
        for name in rates:
            rates[name].append(child("branches", name, options.steps, one_core=name == ONE_CORE)["rate"])
        planned = child("plan")
        measured = child("again", planned["calls"])["seconds"]
        ratios.append([predicted / actual for predicted, actual in zip(planned["seconds"], measured, strict=True)])
    rows = [(name, _spread(values)) for name, values in rates.items()]
    side_by_side.table(rows, ["median", "from", "to"], "steps per second of two towers")
    for one, other in ((ONE, ONE_CORE), (TWO, ONE_CORE), (TWO, ONE)):
        speedups = [a / b for a, b in zip(rates[one], rates[other], strict=True)]
        print(f"{one} : {other}, by rounds: {_text(speedups)}")
    for stage in range(STAGES):
        of_stage = _text([round_ratios[stage] for round_ratios in ratios])
        print(f"stage {stage}, predicted : measured again, by rounds: {of_stage}")
    side_by_side.save(options.json, {"steps per second": rates, "predicted : measured": ratios})


def _spread(values):
    return {"median": statistics.median(values), "from": min(values), "to": max(values)}


def _text(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})"


if __name__ == "__main__":
    if "--child" in sys.argv:
        name, *arguments = json.loads(sys.argv[-1])
        print(json.dumps({"branches": branches, "plan": plan, "again": again}[name](*arguments)))
    else:
        main()
