"""Time to accuracy on a slow line: two hosts at 100 Mbit/s, 5.8 million parameters, 32 samples a worker.

    python benchmarks/compression_time.py [--seeds 3] [--methods none …] [--steps 120]

Needs root and iproute2: the hosts are network namespaces, which are made and removed here. Without a line, over shared
memory, the same is measured for a few steps, to show where compression does not pay.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import side_by_side

sys.path.insert(0, str(Path(__file__).parent.parent))

BATCH = 64
EVERY = 5
"""Steps between readings of the accuracy."""
LEARNING_RATE, MOMENTUM = 0.02, 0.9
WITHOUT_MOMENTUM = "OneBit", "SignSGD", "RandomK 1 %", "DGC 0.1 %"
"""Trained at five times the rate instead; DGC has its own."""


def methods():
    from tfdist import compression as c

    return {
        "none": None,
        "Float16": c.Float16(),
        "Float8": c.Float8(),
        "Int8": c.Int8(),
        "Int4": c.Int4(),
        "QSGD(127)": c.QSGD(),
        "TernGrad": c.TernGrad(block=512),
        "OneBit": c.OneBit(),
        "SignSGD": c.SignSGD(),
        "RandomK 1 %": c.ErrorFeedback(c.RandomK(0.01)),
        "TopK 1 %": c.TopK(0.01),
        "TopK 0.1 %": c.TopK(0.001),
        "DGC 0.1 %": c.DeepGradientCompression(0.001, MOMENTUM),
        "Strom 1/400": c.Strom(density=1 / 400),
        "Atomo 1 %": c.Atomo(0.01),
        "PowerSGD(2)": c.PowerSGD(2),
    }


def train(name, seed, target, steps):
    """Reports seconds of training, without those of the readings, and accuracies, until the target is reached."""
    import fashion

    (x, y), (x_test, y_test) = fashion.load()
    import keras
    import tensorflow as tf

    import tfdist

    keras.utils.set_random_seed(seed)
    strategy = tfdist.AllReduceStrategy(compression=methods()[name])
    with strategy.scope():
        model = fashion.mlp(units=(2048, 2048))
        momentum = 0.0 if name in WITHOUT_MOMENTUM else MOMENTUM
        model.compile(
            keras.optimizers.SGD(LEARNING_RATE if momentum else 5 * LEARNING_RATE, momentum=momentum),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed).repeat().batch(BATCH)
    readings: list[list[float]] = []

    class Read(keras.callbacks.Callback):
        """The accuracy after every few steps; the clock stands still meanwhile."""

        def on_train_begin(self, logs=None):
            self.seconds = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self.begun = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds += time.perf_counter() - self.begun
            accuracy = self.model.evaluate(x_test[:2000], y_test[:2000], batch_size=1000, verbose=0)[1]
            readings.append([self.seconds, EVERY * (epoch + 1), accuracy])
            self.model.stop_training = accuracy >= target

    model.fit(data, steps_per_epoch=1, epochs=1, verbose=0)  # traced and built
    model.fit(data, steps_per_epoch=EVERY, epochs=steps // EVERY, verbose=0, callbacks=[Read()])
    done = readings[-1][1] + 1
    if strategy.rank == 0:
        sent = sum(one["sent_bytes"] for one in strategy.compression().values())
        side_by_side.report({"readings": readings, "mib_a_step": sent / done / 2**20})


def to_target(run, target):
    return next((seconds for seconds, _, accuracy in run["readings"] if accuracy >= target), None)


def main():
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--target", type=float, default=0.75)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--methods", nargs="+", default=list(methods()))
    options = parser.parse_args()
    import network

    from tests.multiprocess import namespaces

    found = {"line": {}, "shared memory": {}}
    with namespaces.hosts(2, options.rate) as names:
        for name in options.methods:
            found["line"][name] = []
            for seed in range(options.seeds):
                command = [__file__, "train", name, str(seed), str(options.target), str(options.steps)]
                run = network.on_hosts(names, (0, 1), command, namespaces.SETTINGS)
                found["line"][name].append(run)
                print(f"{name:12} seed {seed}: {to_target(run, options.target)} s {run['readings'][-1]}", flush=True)
                side_by_side.save(options.json, {**vars(options), "json": None, **found})
    for name in options.methods:
        command = [__file__, "train", name, "0", "2.0", str(5 * EVERY)]
        found["shared memory"][name] = side_by_side.measure(command, 2, way="tfdist")
    rows = []
    base = [to_target(run, options.target) for run in found["line"].get("none", [])]
    for name, runs in found["line"].items():
        times = [to_target(run, options.target) for run in runs]
        row = {"ms a step": 1e3 * statistics.median(r["readings"][-1][0] / r["readings"][-1][1] for r in runs)}
        shared = found["shared memory"][name]["readings"][-1]
        row["in memory"] = 1e3 * shared[0] / shared[1]
        if all(times):
            row["s to target"] = statistics.median(times)
            if base and all(base):
                row["faster"] = statistics.median(base) / row["s to target"]
        rows.append((name, row))
    side_by_side.table(
        rows, ["ms a step", "s to target", "faster", "in memory"], f"to {options.target:.0%} at {options.rate}"
    )
    side_by_side.save(options.json, {**vars(options), "json": None, **found})


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
