"""Steps per second of four workers of which one is slow, or pauses once, in every mode and with all-reduce.

The workers sleep instead of computing, so that they need no cores of their own. Their steps are counted while all of
them train, and compared with the sum of the rates that each has alone, with a server of its own.

- *slow*: one of them sleeps 5 times as long as the others in every step.
- *pause*: all sleep equally, and one of them once for 8 more steps. Counted over the pause and as long after it; alone,
  the worker that pauses would make half of the steps in this time.

    python benchmarks/servers_delays.py
"""

import json
import sys
import time

import servers
import side_by_side

WORKERS = 4
SLOWER = 5
PAUSED_STEPS = 8
FIRST = 5
"""Steps that are not counted, in which functions are traced."""
MODES = ("Asynchronous()", f"BoundedStaleness({PAUSED_STEPS + 2})", "Synchronous()", servers.ALL_REDUCE)
IN_STEP = ("Synchronous()", servers.ALL_REDUCE)
"""Modes in which all workers make the same number of steps."""


def measure(mode, workers):
    """Trains on every worker. Each reports when its steps ended, and when its pause began, in seconds."""
    strategy = servers.strategy(mode)
    import keras
    import numpy as np
    import tensorflow as tf

    mine = workers[servers.rank()]

    class Compute(keras.callbacks.Callback):
        """Sleeps; the clock is the same in all processes of this machine."""

        def __init__(self):
            super().__init__()
            self.ends = []
            self.paused = None

        def on_train_batch_begin(self, batch, logs=None):
            if batch == mine["pauses at"]:
                self.paused = time.monotonic()
                time.sleep(mine["pause"])
            time.sleep(mine["sleep"])

        def on_train_batch_end(self, batch, logs=None):
            self.ends.append(time.monotonic())

    keras.utils.set_random_seed(0)
    x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(axis=1, keepdims=True))).repeat().batch(8)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    compute = Compute()
    servers.meet(len(workers))
    model.fit(data, steps_per_epoch=mine["steps"], epochs=1, verbose=0, callbacks=[compute])
    servers.report({"ends": compute.ends, "paused": compute.paused})


def steps_between(ends, begin, end):
    """Returns a worker's steps in an interval, with the fractions of steps at its ends.

    Args:
        ends: times at which the worker's steps ended, in seconds.
        begin: begin of the interval, in seconds.
        end: end of the interval, in seconds.
    """

    def at(moment):
        after = next((place for place, end in enumerate(ends) if end > moment), len(ends))
        if after in (0, len(ends)):
            return float(after)
        return after + (moment - ends[after - 1]) / (ends[after] - ends[after - 1])

    return at(end) - at(begin)


def steps_per_second(reports):
    """Returns the steps per second of each worker, while all of them train."""
    begin = max(report["ends"][FIRST] for report in reports)
    end = min(report["ends"][-1] for report in reports)
    if end <= begin:
        raise RuntimeError("the workers have never trained at the same time: give more --seconds")
    return [steps_between(report["ends"], begin, end) / (end - begin) for report in reports]


def train(mode, workers):
    return servers.run(
        [__file__, "--measure", mode, json.dumps(workers)],
        len(workers),
        servers=0 if mode == servers.ALL_REDUCE else 1,
        cores="all",
    )


def worker(sleep, steps, pauses_at=None, pause=0.0):
    return {"sleep": sleep, "steps": FIRST + int(steps), "pauses at": pauses_at, "pause": pause}


def slow_worker(mode, sleep, seconds):
    """The workers' steps per second; the last one sleeps longer."""
    sleeps = [sleep] * (WORKERS - 1) + [SLOWER * sleep]
    return steps_per_second(
        train(mode, [worker(duration, seconds / (max(sleeps) if mode in IN_STEP else duration)) for duration in sleeps])
    )


def one_pause(mode, sleep, seconds, rate):
    """The steps of all during a pause and as long after it, among those that each would make alone."""
    steps, pause = seconds / sleep, PAUSED_STEPS / rate
    middle = FIRST + int(steps / 2)
    workers = [worker(sleep, steps) for _ in range(WORKERS - 1)]
    reports = train(mode, [*workers, worker(sleep, steps, middle, pause)])
    begin = reports[-1]["paused"]
    end = begin + 2 * pause
    if any(report["ends"][-1] < end or report["ends"][FIRST] > begin for report in reports):
        raise RuntimeError("not all workers have trained before and after the pause: give more --seconds")
    made = sum(steps_between(report["ends"], begin, end) for report in reports)
    return made / (PAUSED_STEPS * (2 * (WORKERS - 1) + 1))


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--milliseconds", type=float, default=20, help="how long a worker sleeps in each step")
    parser.add_argument("--seconds", type=float, default=10, help="how long each run trains")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options = parser.parse_args()
    sleep, seconds = options.milliseconds / 1e3, options.seconds
    if seconds < 4 * SLOWER * sleep:
        parser.error(f"--seconds must be at least {4 * SLOWER * sleep:g}, for some steps of the slow worker")
    figures = {"alone": [], "slow": {}, "pause": {}}
    for _ in range(options.rounds):
        fast, slow = (
            steps_per_second(train("Asynchronous()", [worker(duration, seconds / duration)]))[0]
            for duration in (sleep, SLOWER * sleep)
        )
        figures["alone"].append([fast, slow])
        for mode in options.modes:
            rates = slow_worker(mode, sleep, seconds)
            share = sum(rates) / ((WORKERS - 1) * fast + slow)
            figures["slow"].setdefault(mode, []).append({"steps per second": rates, "share": share})
            figures["pause"].setdefault(mode, []).append(one_pause(mode, sleep, seconds, fast))
            print(
                f"{mode}: {share:.0%} with a slow worker, {figures['pause'][mode][-1]:.0%} over a pause",
                file=sys.stderr,
            )
            side_by_side.save(options.json, figures)
    rows = [(mode, servers.spread([100 * run["share"] for run in runs])) for mode, runs in figures["slow"].items()]
    columns = ["median", "from", "to"]
    side_by_side.table(rows, columns, f"one of {WORKERS} workers {SLOWER} × slower: % of the sum of the rates alone")
    rows = [(mode, servers.spread([100 * share for share in shares])) for mode, shares in figures["pause"].items()]
    side_by_side.table(rows, columns, f"one pause of {PAUSED_STEPS} steps: % of the steps alone")
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
