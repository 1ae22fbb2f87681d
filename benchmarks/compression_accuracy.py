"""Fashion-MNIST with every compression method: test accuracy, bytes sent, time. 4 workers, several seeds.

python benchmarks/compression_accuracy.py [--seeds 3] [--epochs 2] [--models mlp lenet] [--methods none topk …]
"""

import json
import os
import statistics
import sys
import time

import side_by_side

LEARNING_RATE, MOMENTUM = 0.05, 0.9
WITHOUT_MOMENTUM = {
    **dict.fromkeys(("none, no momentum", "OneBit", "SignSGD", "RandomK 10 %"), 0.1),
    "DGC 0.1 %": LEARNING_RATE,
}
"""Learning rates, which fall linearly to zero: seeds then differ by 0.1 to 0.2 points, not by 2.

What is sent late adds up with momentum: signs and random elements diverge at this rate with it. DGC has its own.
"""


def methods(steps):
    """The methods by name, for a run of the given number of steps."""
    from tfdist import compression as c

    return {
        "none": None,
        "none, no momentum": None,
        "Float16": c.Float16(),
        "Int8": c.Int8(),
        "OneBit": c.OneBit(),
        "SignSGD": c.SignSGD(),
        "TopK 1 %": c.TopK(0.01),
        "DGC 0.1 %": c.DeepGradientCompression(0.001, MOMENTUM, warmup_steps=steps // 20),
        "Strom 1/400": c.Strom(density=1 / 400),
        "PowerSGD(4)": c.PowerSGD(4),
        "Float8 e4m3": c.Float8("e4m3"),
        "QSGD(127)": c.QSGD(127),
        "TernGrad": c.TernGrad(block=512),
        "RandomK 10 %": c.ErrorFeedback(c.RandomK(0.1)),
        "Atomo 10 %": c.Atomo(0.1),
        "BFloat16": c.BFloat16(),
        "Int4": c.Int4(),
        "QSGD(7)": c.QSGD(7, block=128),
        "Float8 e5m2": c.Float8("e5m2"),
        "TopK 0.1 %": c.TopK(0.001),
        "AtomoSVD(3)": c.AtomoSVD(3),
    }


def train(model_name, epochs, seeds, wanted, partial):
    """Runs on every process; the chief reports."""
    import fashion

    (x, y), test = fashion.load()
    import keras

    import tfdist

    batch = 256
    results = {}
    steps = epochs * -(-len(x) // batch)
    every = methods(steps)
    for name in wanted or every:
        runs = []
        for seed in range(seeds):
            keras.utils.clear_session()
            keras.utils.set_random_seed(seed)
            strategy = tfdist.AllReduceStrategy(compression=every[name])
            with strategy.scope():
                model = {"mlp": fashion.mlp, "lenet": fashion.lenet}[model_name]()
                model.compile(
                    keras.optimizers.SGD(
                        keras.optimizers.schedules.PolynomialDecay(
                            WITHOUT_MOMENTUM.get(name, LEARNING_RATE), steps, end_learning_rate=0.0
                        ),
                        momentum=0.0 if name in WITHOUT_MOMENTUM else MOMENTUM,
                    ),
                    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                    metrics=["accuracy"],
                )
            before = strategy.communication()["bytes"]
            begin = time.perf_counter()
            model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0)
            seconds = time.perf_counter() - begin
            sent = strategy.communication()["bytes"] - before
            traffic = strategy.compression().values()
            accuracy = model.evaluate(*test, batch_size=1000, verbose=0)[1]
            ratio = sum(counts["plain_bytes"] for counts in traffic) / max(
                1, sum(counts["sent_bytes"] for counts in traffic)
            )
            runs.append({"accuracy": accuracy, "mib_sent": sent / 2**20, "seconds": seconds, "ratio": ratio})
        results[name] = runs
        if strategy.rank == 0:
            accuracies = [100 * run["accuracy"] for run in runs]
            print(f"{model_name:6} {name:12} {accuracies} {runs[-1]}", file=sys.stderr, flush=True)
            side_by_side.save(partial, results)
            side_by_side.report(results)


def main():
    parser = side_by_side.parser(__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--models", nargs="+", default=["mlp", "lenet"])
    parser.add_argument("--methods", nargs="+")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    results = {}
    for name in options.models:
        command = [__file__, "train", name, str(options.epochs), str(options.seeds), json.dumps(options.methods)]
        command.append(f"{options.json}.{name}" if options.json else "")
        results[name] = side_by_side.measure(command, options.processes, way="tfdist", deadline=None)
    for name, rows in results.items():
        columns = {
            method: {
                "accuracy, %": 100 * statistics.median(run["accuracy"] for run in runs),
                "± %": 50 * (max(run["accuracy"] for run in runs) - min(run["accuracy"] for run in runs)),
                "MiB sent": runs[0]["mib_sent"],
                "ratio": runs[0]["ratio"],
                "s": statistics.median(run["seconds"] for run in runs),
            }
            for method, runs in rows.items()
        }
        side_by_side.table(list(columns.items()), list(next(iter(columns.values()))), f"{name}, Fashion-MNIST")
    side_by_side.save(options.json, {"epochs": options.epochs, "seeds": options.seeds, "models": results})


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), json.loads(sys.argv[5]), sys.argv[6])
    else:
        main()
