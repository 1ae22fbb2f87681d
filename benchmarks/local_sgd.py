"""Time to an accuracy over slow lines: rounds of local steps, DiLoCo, Streaming DiLoCo and gossip, against all-reduce.

    python benchmarks/local_sgd.py [--seeds 3] [--rates 1gbit 100mbit] [--target 0.85] [--steps 4096]

Fashion-MNIST, a perceptron of 235,146 parameters, two hosts with 32 samples each per step. Training stops when the
target share of the 10,000 test images is classified correctly, which is asked every 64 steps; the time of asking is not
counted. The best accuracy is that within ``--steps``.

Needs root and iproute2: the hosts are network namespaces, which the script makes and removes.
"""

import os
import statistics
import sys
import time
from pathlib import Path

import side_by_side

sys.path.insert(0, str(Path(__file__).parent.parent))

BATCH = 64
EVERY = 64
"""Steps per epoch, which ends a round."""


def strategies():
    """How to make the strategies, by name."""
    import keras

    import tfdist
    from tfdist.parameter_server import Asynchronous

    outer = tfdist.local_sgd.Outer(keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True))
    streaming = tfdist.local_sgd.Streaming(fragments=4, delay=4)
    local, int8 = tfdist.LocalSGDStrategy, tfdist.compression.Int8()
    return {
        "all-reduce": tfdist.AllReduceStrategy,
        "all-reduce, TopK 1 %": lambda: tfdist.AllReduceStrategy(compression=tfdist.compression.TopK(0.01)),
        "all-reduce, delay 1": lambda: tfdist.AllReduceStrategy(delay=1),
        "local SGD, k = 4": lambda: local(4),
        "local SGD, k = 16": lambda: local(16),
        "local SGD, k = 64": lambda: local(64),
        "DiLoCo, k = 64": lambda: local(64, rule=outer),
        "DiLoCo, k = 64, Int8": lambda: local(64, rule=outer, compression=int8),
        "Streaming DiLoCo": lambda: local(64, rule=outer, streaming=streaming, compression=tfdist.compression.Int4()),
        "elastic, k = 16": lambda: local(16, rule=tfdist.local_sgd.Elastic(0.9)),
        "gossip": lambda: tfdist.GossipStrategy(overlap=True),
        "gossip, k = 16": lambda: tfdist.GossipStrategy(sync_every=16, overlap=True),
        "gossip, TopK 1 %": lambda: tfdist.GossipStrategy(compression=tfdist.compression.TopK(0.01)),
        "gossip in pairs": lambda: tfdist.GossipStrategy(synchronization=Asynchronous()),
    }


def train(made, seed, target, steps, callbacks=list, epochs=1):
    """Runs on every process; the first one reports.

    Args:
        made: makes the strategy, when the data have been read.
        seed: seed of weights and batches.
        target: accuracy at which training stops.
        steps: maximum number of steps.
        callbacks: makes the callbacks of `fit`.
        epochs: number of epochs between two readings of the accuracy.
    """
    import fashion

    (x, y), test = fashion.load()
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(seed)
    strategy = made()
    with strategy.scope():
        model = fashion.mlp()
        model.compile(
            keras.optimizers.SGD(0.02, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=seed).repeat().batch(BATCH)
    readings: list[list[float]] = []

    class Read(keras.callbacks.Callback):
        """The accuracy on all test images; its time is not counted, nor is the tracing of the first epoch."""

        def on_train_begin(self, logs=None):
            self.seconds, self.sent = 0.0, strategy.communication()["bytes"]

        def on_epoch_begin(self, epoch, logs=None):
            self.begun = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.seconds += time.perf_counter() - self.begun
            if (epoch + 1) % epochs:
                return
            sent = strategy.communication()["bytes"] - self.sent
            before = strategy.communication()["bytes"]
            accuracy = self.model.evaluate(*test, batch_size=1000, verbose=0)[1]
            self.sent += strategy.communication()["bytes"] - before
            readings.append([self.seconds, EVERY * (epoch + 1), sent, accuracy])
            self.model.stop_training = accuracy >= target

    model.fit(data, steps_per_epoch=1, epochs=1, verbose=0)
    model.evaluate(*test, batch_size=1000, verbose=0)
    model.fit(data, steps_per_epoch=EVERY, epochs=steps // EVERY, verbose=0, callbacks=[Read(), *callbacks()])
    if strategy.rank == 0:
        side_by_side.report({"readings": readings})


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", nargs="+", default=["1gbit", "100mbit"])
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--names", nargs="+", default=list(strategies()))
    options = parser.parse_args()
    import network

    from tests.multiprocess import namespaces

    if not namespaces.AVAILABLE:
        sys.exit("needs root and iproute2 to make network namespaces")
    results = {}
    for rate in options.rates:
        results[rate] = {name: [] for name in options.names}
        with namespaces.hosts(2, rate) as names:
            for seed in range(options.seeds):  # in turn, so that a slow spell of the machine meets all
                for name in options.names:
                    command = [__file__, "train", name, str(seed), str(options.target), str(options.steps)]
                    run = network.on_hosts(names, (0, 1), command, namespaces.SETTINGS)["readings"]
                    results[rate][name].append(run)
                    print(f"{rate} {name}, seed {seed}: {run[-1]}", file=sys.stderr, flush=True)
                    side_by_side.save(options.json, results)
        rows = []
        for name, runs in results[rate].items():
            ends = [run[-1] for run in runs]
            row = {
                "steps": statistics.median(end[1] for end in ends),
                "MB sent": statistics.median(end[2] for end in ends) / 1e6,
                "best, %": 100 * statistics.median(max(reading[3] for reading in run) for run in runs),
            }
            if all(end[3] >= options.target for end in ends):
                seconds = side_by_side.median_and_spread([end[0] for end in ends])
                row |= {"s": seconds[0], "from": seconds[1], "to": seconds[2]}
            rows.append((name, row))
        columns = ["s", "from", "to", "steps", "MB sent", "best, %"]
        side_by_side.table(rows, columns, f"to {options.target:.0%} at {rate}, {options.seeds} seed(s)")


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1:2] == ["train"]:
        train(lambda: strategies()[sys.argv[2]](), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
