"""Time to an accuracy with processes that stall now and then: gossip against all-reduce and local SGD.

    python benchmarks/gossip.py [--seeds 3] [--processes 4] [--chance 0.1] [--milliseconds 100] [--target 0.85]

Fashion-MNIST as in ``local_sgd.py``. In each step each process stands still for some milliseconds with some chance, as
on a machine that others use, too. All processes are on this machine and share its cores. Training stops when the target
share of the 10,000 test images is classified correctly, which is asked every 64 steps; the time of asking is not
counted.
"""

import os
import statistics
import sys
import time

import local_sgd
import numpy as np
import side_by_side


def strategies():
    """How to make the strategies, by name."""
    import tfdist
    from tfdist.parameter_server import Asynchronous, BoundedStaleness

    gossip = tfdist.GossipStrategy
    return {
        "all-reduce": tfdist.AllReduceStrategy,
        "local SGD, k = 16": lambda: tfdist.LocalSGDStrategy(sync_every=16),
        "ring": gossip,
        "exponential, overlapped": lambda: gossip("exponential", overlap=True),
        "ring, bounded staleness 8": lambda: gossip(synchronization=BoundedStaleness(8)),
        "in pairs": lambda: gossip("complete", synchronization=Asynchronous()),
    }


def stalls(seed, chance, seconds):
    """A callback that stands still now and then."""
    import keras

    class Stalls(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.draws = np.random.default_rng([seed, self.model.distribute_strategy.rank])

        def on_train_batch_begin(self, batch, logs=None):
            if self.draws.random() < chance:
                time.sleep(seconds)

    return Stalls()


def train(name, seed, target, steps, chance, seconds):
    """Runs on every process."""
    local_sgd.train(lambda: strategies()[name](), seed, target, steps, lambda: [stalls(seed, chance, seconds)])


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--chance", type=float, default=0.1, help="of standing still in a step")
    parser.add_argument("--milliseconds", type=float, default=100, help="for how long")
    parser.add_argument("--target", type=float, default=0.85)
    parser.add_argument("--steps", type=int, default=2048)
    parser.add_argument("--names", nargs="+", default=list(strategies()))
    options = parser.parse_args()
    how = [options.target, options.steps, options.chance, options.milliseconds / 1e3]
    results = {name: [] for name in options.names}
    for seed in range(options.seeds):  # in turn, so that a slow spell of the machine meets all
        for name in options.names:
            command = [__file__, "train", name, str(seed), *map(str, how)]
            run = side_by_side.measure(command, options.processes, way="tfdist")["readings"]
            results[name].append(run)
            print(f"{name}, seed {seed}: {run[-1]}", file=sys.stderr, flush=True)
            side_by_side.save(options.json, results)
    rows = []
    for name, runs in results.items():
        ends = [run[-1] for run in runs]
        rates = side_by_side.median_and_spread([end[1] / end[0] for end in ends])
        row = {"steps": statistics.median(end[1] for end in ends)}
        row |= dict(zip(("steps/s", "least", "most"), rates, strict=True))
        if all(end[3] >= options.target for end in ends):
            row |= dict(zip(("s", "from", "to"), side_by_side.median_and_spread([end[0] for end in ends]), strict=True))
        rows.append((name, row))
    columns = ["s", "from", "to", "steps", "steps/s", "least", "most"]
    title = f"to {options.target:.0%} with {options.processes} processes, {options.seeds} seed(s)"
    side_by_side.table(rows, columns, title)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], int(sys.argv[3]), *map(float, sys.argv[4:5]), int(sys.argv[5]), *map(float, sys.argv[6:]))
    else:
        main()
