"""Steps per second of a small model (25,000 parameters, 100 kB) with one worker and one parameter server.

Compared with plain Keras in one process, and with TensorFlow's own parameter servers, once with a step in each call
that its coordinator schedules, once with several; tfdist likewise, by `steps_per_execution`, with the next step
computed while the last one is on its way (`prefetch=1`) and without, and with `Hogwild`. Rounds alternate. A last part
counts, with two workers, how many of the steps the optimizer's iterations contain at the end: TensorFlow's workers
overwrite each other's count, and tfdist counts each push once.

    python benchmarks/servers_small.py
"""

import contextlib
import itertools
import os
import statistics
import sys
import time

import servers
import side_by_side

BATCH, INPUTS, HIDDEN, OUTPUTS = 32, 64, 256, 32
STEPS_PER_CALL = 20
TENSORFLOW = {"TensorFlow, 1 step a call": 1, f"TensorFlow, {STEPS_PER_CALL} steps a call": STEPS_PER_CALL}
PLAIN = "plain Keras"
TFDIST = {  # prefetch, steps in a call, pushes
    "tfdist": (0, 1, "None"),
    "tfdist, prefetch=1": (1, 1, "None"),
    f"tfdist, {STEPS_PER_CALL} steps a call": (0, STEPS_PER_CALL, "None"),
    f"tfdist, prefetch=1, {STEPS_PER_CALL} steps a call": (1, STEPS_PER_CALL, "None"),
    "tfdist, Hogwild": (0, 1, "Hogwild"),
    f"tfdist, Hogwild, {STEPS_PER_CALL} steps a call": (0, STEPS_PER_CALL, "Hogwild"),
}


def make_model():
    import keras

    return keras.Sequential(
        [keras.layers.Input((INPUTS,)), keras.layers.Dense(HIDDEN, "relu"), keras.layers.Dense(OUTPUTS)]
    )


def make_dataset():
    """An endless dataset."""
    import numpy as np
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(100 * BATCH, INPUTS)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, x[:, :OUTPUTS])).repeat().batch(BATCH)


def by_fit(model, steps, readings, dataset=None):
    """Steps per second of each epoch of `fit`, after one that is not counted."""
    import keras

    ends = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))
    model.fit(dataset or make_dataset(), steps_per_epoch=steps, epochs=readings + 1, verbose=0, callbacks=[clock])
    return [steps / (after - before) for before, after in itertools.pairwise(ends)]


def measure_keras(name, steps, readings):
    import keras

    scope, steps_per_call = contextlib.nullcontext(), 1
    if name != PLAIN:
        import tfdist
        from tfdist.parameter_server import Gradients, Hogwild

        prefetch, steps_per_call, pushes = TFDIST[name]
        pushed = Hogwild() if pushes == "Hogwild" else Gradients(prefetch=prefetch)
        strategy = tfdist.ParameterServerStrategy(pushes=pushed)
        scope = strategy.scope()
    keras.utils.set_random_seed(0)
    with scope:
        model = make_model()
        model.compile("adam", "mse", steps_per_execution=steps_per_call)
    rates = by_fit(model, steps, readings)
    figures = {"rates": rates, "steps": steps * (readings + 1), "iterations": int(model.optimizer.iterations)}
    (side_by_side if name == PLAIN else servers).report(figures)


def measure_tensorflow(workers, steps_per_call, steps, readings):
    import servers_tensorflow

    with servers_tensorflow.running(workers, 1) as cluster:
        side_by_side.report(
            servers_tensorflow.train(cluster, make_model, make_dataset, steps_per_call, steps, readings)
        )
        os._exit(0)  # the coordinator's threads cannot be ended; its servers end with this process


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="steps of a reading")
    parser.add_argument("--readings", type=int, default=5, help="readings of a round, of which the median is taken")
    parser.add_argument(
        "--cores", choices=("share", "all"), default="share", help="of tfdist run; the others may use all cores"
    )
    options = parser.parse_args()
    amount = [str(options.steps), str(options.readings)]

    def tensorflow(workers, steps_per_call):
        return side_by_side.measure(
            [__file__, "--measure-tensorflow", str(workers), str(steps_per_call), *amount], cores=False
        )

    def tfdist(name, workers):
        return servers.run([__file__, "--measure-keras", name, *amount], workers, cores=options.cores)

    rates = {name: [] for name in (PLAIN, *TFDIST, *TENSORFLOW)}
    for _ in range(options.rounds):
        reports = {PLAIN: side_by_side.measure([__file__, "--measure-keras", PLAIN, *amount], cores=False)}
        reports.update({name: tfdist(name, 1)[0] for name in TFDIST})
        reports.update({name: tensorflow(1, steps) for name, steps in TENSORFLOW.items()})
        for name, report in reports.items():
            rates[name].append(statistics.median(report["rates"]))
    ratios = {
        f"{name} : {other}": divided(rates[name], rates[other])
        for name, (_, steps_per_call, _) in TFDIST.items()
        for other in (PLAIN, *(other for other, steps in TENSORFLOW.items() if steps == steps_per_call))
    }
    columns = ["median", "from", "to"]
    side_by_side.table(
        [(name, servers.spread(values)) for name, values in rates.items()], columns, "steps per second, by rounds"
    )
    side_by_side.table(
        [(name, servers.spread(values)) for name, values in ratios.items()], columns, "ratios, by rounds"
    )
    counts = {name: tensorflow(2, steps) for name, steps in TENSORFLOW.items()}
    ours = tfdist("tfdist", 2)
    counts["tfdist"] = {
        "steps": sum(report["steps"] for report in ours),
        "iterations": max(report["iterations"] for report in ours),  # of the last worker to end
    }
    counts = {name: {"steps": report["steps"], "iterations": report["iterations"]} for name, report in counts.items()}
    print("\n2 workers: how many steps the optimizer's iterations contain at the end")
    for name, count in counts.items():
        print(f"{name}: {count['iterations']} of {count['steps']}")
    side_by_side.save(options.json, {"steps per second": rates, "ratios": ratios, "2 workers": counts})


def divided(ours, theirs):
    return [rate / other for rate, other in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    if "--measure-tensorflow" in sys.argv:
        measure_tensorflow(*map(int, sys.argv[2:6]))
    elif "--measure-keras" in sys.argv:
        measure_keras(sys.argv[2], *map(int, sys.argv[3:5]))
    else:
        main()
