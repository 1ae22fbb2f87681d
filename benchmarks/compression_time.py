"""Time to accuracy on a slow network: two hosts at 100 Mbit/s, 5.8 million parameters, 32 samples per worker.

    python benchmarks/compression_time.py [--seeds 3] [--methods none …] [--steps 2000] [--only steps | rates]

The time is the product of two measurements. *Steps*: the number of steps until a given fraction of the 10,000 test
images is classified correctly, which does not depend on the network, and is counted over shared memory. *Rates*: the
time of a step on the network, and over shared memory, from 40 steps in the first half of an epoch. The product was
checked against training on the network; ``--check`` repeats this, up to the first target.

Needs root and iproute2: the hosts are network namespaces, which the script makes and removes.
"""

import json
import os
import statistics
import sys
import time
from pathlib import Path

import side_by_side

sys.path.insert(0, str(Path(__file__).parent.parent))

BATCH = 64
EVERY = 5
"""Steps per epoch; the accuracy is measured after one epoch, later after a twentieth of the steps made so far."""
LEARNING_RATE, MOMENTUM = 0.02, 0.9
WITHOUT_MOMENTUM = "OneBit", "SignSGD", "RandomK 1 %"
"""Trained at five times the learning rate instead."""
HAS_ITS_OWN = "DGC 0.1 %"
"""The method applies momentum, the optimizer none, at the same learning rate."""


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


def prepared(name, seed):
    """A strategy, a model that is traced and built, and its endless dataset."""
    import fashion

    (x, y), test = fashion.load()
    import keras
    import tensorflow as tf

    import tfdist

    keras.utils.set_random_seed(seed)
    strategy = tfdist.AllReduceStrategy(compression=methods()[name])
    momentum = 0.0 if name in (*WITHOUT_MOMENTUM, HAS_ITS_OWN) else MOMENTUM
    rate = 5 * LEARNING_RATE if name in WITHOUT_MOMENTUM else LEARNING_RATE
    with strategy.scope():
        model = fashion.mlp(units=(2048, 2048))
        model.compile(
            keras.optimizers.SGD(rate, momentum=momentum),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed).repeat().batch(BATCH)
    model.fit(data, steps_per_epoch=1, epochs=1, verbose=0)
    return strategy, model, data, test


def train(name, seed, target, steps):
    """Reports seconds (without evaluation), steps and accuracy at each evaluation until the target is reached."""
    strategy, model, data, test = prepared(name, seed)
    import keras

    readings: list[list[float]] = []

    class Read(keras.callbacks.Callback):
        """The accuracy on all test images; its time is not counted."""

        def on_train_begin(self, logs=None):
            self.seconds = 0.0

        def on_epoch_begin(self, epoch, logs=None):
            self.begun = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds += time.perf_counter() - self.begun
            made = EVERY * (epoch + 1)
            if readings and made < 1.05 * readings[-1][1]:
                return
            accuracy = self.model.evaluate(*test, batch_size=1000, verbose=0)[1]
            readings.append([self.seconds, made, accuracy])
            self.model.stop_training = accuracy >= target

    model.fit(data, steps_per_epoch=EVERY, epochs=steps // EVERY, verbose=0, callbacks=[Read()])
    if strategy.rank == 0:
        side_by_side.report({"readings": readings})


def rate(name, steps):
    """Reports the time of a step and the bytes that it sends."""
    strategy, model, data, _ = prepared(name, 0)
    model.fit(data, steps_per_epoch=EVERY, epochs=1, verbose=0)

    def sent():
        traffic = [counts["sent_bytes"] for counts in strategy.compression().values()]
        return sum(traffic) if traffic else strategy.communication()["bytes"]

    before, begun = sent(), time.perf_counter()
    model.fit(data, steps_per_epoch=steps, epochs=1, verbose=0)
    seconds = (time.perf_counter() - begun) / steps
    if strategy.rank == 0:
        side_by_side.report({"seconds": seconds, "mib": (sent() - before) / steps / 2**20})


def to_target(run, target):
    """Steps of a run to a target; None if it was not reached."""
    return next((steps for _, steps, accuracy in run["readings"] if accuracy >= target), None)


def seconds_to(figures, name, target):
    """Median of the seeds; None if one did not reach the target."""
    steps = [to_target(run, target) for run in figures["steps"][name]]
    if not all(steps) or name not in figures["line"]:
        return None
    return statistics.median(steps) * figures["line"][name]["seconds"]


def main():
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--targets", type=float, nargs="+", default=[0.75, 0.8, 0.85])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--methods", nargs="+", default=list(methods()))
    parser.add_argument("--only", choices=["steps", "rates"], help="keep the other figures of the file")
    parser.add_argument("--check", action="store_true", help="also train on the network")
    options = parser.parse_args()
    import network

    from tests.multiprocess import namespaces

    figures = {"steps": {}, "line": {}, "shared memory": {}, "check": {}}
    if options.only and options.json and Path(options.json).exists():
        figures.update(json.loads(Path(options.json).read_text()))
    figures.update(targets=options.targets, rate=options.rate)
    if options.only != "rates":
        figures["steps"] = {}
        for seed in range(options.seeds):
            for name in options.methods:
                command = [__file__, "train", name, str(seed), str(max(options.targets)), str(options.steps)]
                run = side_by_side.measure(command, 2, way="tfdist", deadline=None)
                figures["steps"].setdefault(name, []).append(run)
                print(f"{name:12} seed {seed}: {[to_target(run, t) for t in options.targets]} steps", flush=True)
                side_by_side.save(options.json, figures)
    if options.only != "steps":
        with namespaces.hosts(2, options.rate) as names:
            for name in options.methods:
                command = [__file__, "rate", name, "40"]
                figures["line"][name] = network.on_hosts(names, (0, 1), command, namespaces.SETTINGS)
                figures["shared memory"][name] = side_by_side.measure(command, 2, way="tfdist")
                print(f"{name:12} {figures['line'][name]}", flush=True)
                side_by_side.save(options.json, figures)
            for name in options.methods if options.check else ():
                command = [__file__, "train", name, "0", str(min(options.targets)), str(options.steps)]
                figures["check"][name] = network.on_hosts(names, (0, 1), command, namespaces.SETTINGS)
                side_by_side.save(options.json, figures)
    rows = []
    for name in figures["steps"]:
        times = {f"s to {target:.0%}": seconds_to(figures, name, target) for target in options.targets}
        rows.append((name, {column: seconds for column, seconds in times.items() if seconds is not None}))
    side_by_side.table(rows, [f"s to {target:.0%}" for target in options.targets], f"at {options.rate}")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    elif sys.argv[1:2] == ["rate"]:
        rate(sys.argv[2], int(sys.argv[3]))
    else:
        main()
