"""`fit` on two processes with one core each: with one thread for TensorFlow's operations in a process, and with two.

The models are those of `peers.py`. Ways alternate; figures are medians of rounds, and ratios medians of the rounds'.

    python benchmarks/threads.py
"""

import os

import peers
import side_by_side

SCRIPT = os.path.join(os.path.dirname(__file__), "peers.py")


def samples_per_second(name, threads):
    seconds = side_by_side.measure(
        [SCRIPT, f"--measure={name}", "tfdist", "2"], 2, {"TF_NUM_INTEROP_THREADS": str(threads)}, way="tfdist"
    )
    return 2 * peers.STEPS[name] * peers.BATCH[name] / seconds


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures = {}
    for name in peers.BATCH:
        rounds = [[samples_per_second(name, threads) for threads in (1, 2)] for _ in range(options.rounds)]
        median, low, high = side_by_side.median_and_spread([one / two for one, two in rounds])
        figures[name] = {"samples_per_s": rounds, "ratio": median, "from": low, "to": high}
        print(f"{name:6} one thread is {median:.2f} × as fast as two ({low:.2f} to {high:.2f})", flush=True)
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    main()
