"""The best accuracy of rounds of local steps, DiLoCo, Streaming DiLoCo and gossip, and after how many steps it comes.

    python benchmarks/local_sgd_best.py [--seeds 3] [--steps 4096]

As ``local_sgd.py``, whose lines do not change what is learned: here two processes of this machine take all steps, and
the accuracy is asked every 256 of them. What that takes over a line follows from the seconds that ``local_sgd.py`` has
measured for a step (``pages.py`` puts both together).
"""

import os
import statistics
import sys

import local_sgd
import side_by_side

EPOCHS = 4
"""Number of epochs between two readings, each of `local_sgd.EVERY` steps."""

NAMES = [
    "all-reduce",
    "all-reduce, TopK 1 %",
    "local SGD, k = 4",
    "local SGD, k = 16",
    "local SGD, k = 64",
    "DiLoCo, k = 64",
    "DiLoCo, k = 64, Int8",
    "Streaming DiLoCo",
    "gossip in pairs",
    "gossip, TopK 1 %",
]


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4096)
    parser.add_argument("--names", nargs="+", default=NAMES)
    options = parser.parse_args()
    results = {name: [] for name in options.names}
    for seed in range(options.seeds):
        for name in options.names:
            command = [__file__, "train", name, str(seed), str(options.steps)]
            run = side_by_side.measure(command, 2, way="tfdist")["readings"]
            results[name].append([[step, accuracy] for _, step, _, accuracy in run])
            print(f"{name}, seed {seed}: {best(results[name][-1])}", file=sys.stderr, flush=True)
            side_by_side.save(options.json, results)
    rows = []
    for name, runs in results.items():
        accuracies = side_by_side.median_and_spread([100 * best(run)[1] for run in runs])
        row = dict(zip(("best, %", "from", "to"), accuracies, strict=True))
        rows.append((name, row | {"steps": statistics.median(best(run)[0] for run in runs)}))
    side_by_side.table(rows, ["best, %", "from", "to", "steps"], f"within {options.steps} steps")


def best(run):
    """The steps and the accuracy of the best reading; of equal ones the first."""
    return max(run, key=lambda reading: (reading[1], -reading[0]))


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if sys.argv[1:2] == ["train"]:
        name, seed, steps = sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
        local_sgd.train(lambda: local_sgd.strategies()[name](), seed, 2.0, steps, epochs=EPOCHS)
    else:
        main()
