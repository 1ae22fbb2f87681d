"""What options of parameter servers are worth: compressed parameters, a server on each host, shared data.

Hosts are network namespaces, connected at `RATE`; the workers compute next to nothing. Options alternate.

- *compression*: a server and two workers on hosts of their own; pushes, and parameters that come back, in 8 bits.
- *hierarchy*: two hosts of two workers whose steps are synchronous; two servers, one, and `PerHost`.
- *data*: two workers of which one sleeps `SLOWER` times as long in each step; the seconds until both have ended an
  epoch, each on its half, and of batches that are dealt out.

    python benchmarks/servers_worth.py

Needs root and iproute2. Traffic stays on this machine; the namespaces are removed at the end.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import servers
import side_by_side

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.multiprocess import namespaces

RATE = "100mbit"
UNITS = 1024
STEPS, FIRST = 16, 4
"""Steps of each worker, and how many of them are not counted, in which functions are traced."""
BATCHES, SLEEP, SLOWER = 60, 0.05, 5

ON_TWO = {"chief": [1], "worker": [2], "ps": [0]}
WAYS = {
    "compression": {
        "nothing": ("steps", ON_TWO, {}),
        "pushes": ("steps", ON_TWO, {"compression": "Int8"}),
        "pushes and parameters": ("steps", ON_TWO, {"compression": "Int8", "parameters": "Int8"}),
    },
    "hierarchy": {
        "two servers": ("steps", {"chief": [0], "worker": [0, 1, 1], "ps": [0, 1]}, {"synchronization": True}),
        "one server": ("steps", {"chief": [0], "worker": [0, 1, 1], "ps": [0]}, {"synchronization": True}),
        "PerHost": ("steps", {"chief": [0], "worker": [0, 1, 1], "ps": [0, 1]}, {"hierarchy": True}),
    },
    "data": {"own": ("epoch", ON_TWO, {}), "shared": ("epoch", ON_TWO, {"data": "shared"})},
}
"""By option and way: what is measured, the host of each task, and the arguments of the strategy."""


def on_hosts(names, where, command):
    """Runs a script as every task of a cluster; returns what each worker reports, the chief first.

    Args:
        names: names of the hosts' network namespaces.
        where: the host of each task, by job.
        command: the script and its arguments.
    """
    ports = iter(range(2222, 2322))
    cluster = {job: [f"10.77.0.{host + 1}:{next(ports)}" for host in hosts] for job, hosts in where.items()}
    popens = []
    for job, hosts in where.items():
        for index, host in enumerate(hosts):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            popens.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", names[host], sys.executable, *command],
                    env={**side_by_side.of_one_core(), "TF_CONFIG": config},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
    return side_by_side.all_reported(popens)


def measure(what, given):
    """Trains on each task, and reports: steps per second, or the seconds of an epoch."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    servers = tfdist.parameter_server
    methods = {
        name: getattr(tfdist.compression, given[name])() for name in ("compression", "parameters") if name in given
    }
    options = {"pushes": servers.Gradients(**methods), **({"data": given["data"]} if "data" in given else {})}
    if "synchronization" in given or "hierarchy" in given:
        options["synchronization"] = servers.Synchronous()
    if "hierarchy" in given:
        options["servers"] = servers.PerHost(synchronization=options["synchronization"])
    strategy = tfdist.ParameterServerStrategy(**options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Input((UNITS,)), keras.layers.Dense(UNITS), keras.layers.Dense(1)]
        model = keras.Sequential(layers if what == "steps" else [keras.layers.Input((UNITS,)), layers[-1]])
        model.compile(keras.optimizers.SGD(1e-6), "mse")  # what is not finite is never compressed
    data = tf.data.Dataset.from_tensors((np.ones((8, UNITS), np.float32), np.ones((8, 1), np.float32)))
    ends = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.monotonic()))
    if what == "steps":
        model.fit(data.repeat(STEPS), verbose=0, callbacks=[note])
        side_by_side.report((STEPS - FIRST) / (ends[-1] - ends[FIRST - 1]))
        return
    seconds = SLEEP * (SLOWER if strategy.rank else 1)
    slow = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: time.sleep(seconds))
    data = data.repeat(BATCHES)
    if given.get("data") != "shared":
        data = data.shard(strategy.size, strategy.rank)
    data = data.apply(tf.data.experimental.assert_cardinality(BATCHES if "data" in given else BATCHES // 2))
    model.fit(data, epochs=1, verbose=0)
    begun = time.monotonic()
    model.fit(data, epochs=1, verbose=0, callbacks=[slow, note])
    side_by_side.report(time.monotonic() - begun)


def main():
    options = side_by_side.parser(__doc__.partition("\n")[0])
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--only", nargs="+", choices=WAYS)
    options = options.parse_args()
    if not namespaces.AVAILABLE:
        sys.exit("needs root and iproute2 to make network namespaces")
    figures = {}
    with namespaces.hosts(3, RATE) as names:
        for option in options.only or WAYS:
            rows = {way: [] for way in WAYS[option]}
            for _ in range(options.rounds):
                for way, (what, where, given) in WAYS[option].items():
                    command = [__file__, f"--measure={json.dumps([what, given])}"]
                    reports = on_hosts(names, where, command)
                    rows[way].append(sum(reports) if what == "steps" else max(reports))
            first = next(iter(rows.values()))
            figures[option] = {
                way: {
                    **servers.spread(values),
                    "ratio": servers.spread([a / b for a, b in zip(values, first, strict=True)]),
                }
                for way, values in rows.items()
            }
            unit = "steps per second of all workers" if option != "data" else "seconds of an epoch"
            for way, row in figures[option].items():
                ratio = row["ratio"]
                print(
                    f"{option}, {RATE}, {way:22}: {row['median']:6.2f} {unit} ({row['from']:.2f} to {row['to']:.2f}), "
                    f"{ratio['median']:.2f} × the first ({ratio['from']:.2f} to {ratio['to']:.2f})",
                    flush=True,
                )
    side_by_side.save(options.json, figures)


if __name__ == "__main__":
    asked = next((argument.partition("=")[2] for argument in sys.argv if argument.startswith("--measure=")), None)
    if asked is None:
        main()
    else:
        measure(*json.loads(asked))
