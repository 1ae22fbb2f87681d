"""Slow networks: hosts made of network namespaces, connected at a given rate. Needs root and iproute2.

    python benchmarks/network.py

Traffic stays on this machine; the namespaces are removed at the end.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import side_by_side

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.multiprocess import namespaces

BITS = {"1gbit": 1e9, "200mbit": 2e8}


def on_hosts(names, where, command, settings):
    """Runs a command as one process on each host in ``where``; returns rank 0's report."""
    ports = [str(2222 + rank) for rank in range(len(where))]
    cluster = {"worker": [f"10.77.0.{host + 1}:{port}" for host, port in zip(where, ports, strict=True)]}
    cores = sorted(os.sched_getaffinity(0))
    popens = []
    for rank, host in enumerate(where):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        environment = {
            **side_by_side.of_one_core(),
            "TF_CONFIG": config,
            "UCX_NET_DEVICES": names[host],
            **settings,
        }
        assigned_cores = {cores[rank]} if len(where) <= len(cores) else set(cores)
        popens.append(
            subprocess.Popen(
                ["ip", "netns", "exec", names[host], sys.executable, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=lambda affinity=assigned_cores: os.sched_setaffinity(0, affinity),
            )
        )
    return side_by_side.all_reported(popens)[-1]


def engine():
    from tfdist.cluster import discovery
    from tfdist.cluster.settings import Timeouts
    from tfdist.runtime import world

    return world.enter(discovery.discover(None), Timeouts.from_environment()).engine


def measure_algorithms(names, mib, repeats):
    """Seconds of all-reduces, measured and predicted by the model with a calibration from here."""
    import numpy as np

    from tfdist.collectives.algorithms import ALGORITHMS
    from tfdist.collectives.cost import CostModel
    from tfdist.engine import calibration
    from tfdist.engine.group import ProcessGroup

    joined = engine()
    model = CostModel(joined.communicator.hosts, calibration.measure(ProcessGroup(joined)))
    buffer = joined.communicator.take(int(mib * 2**20)).view(np.float32)
    buffer[...] = 0
    figures = {}
    for name in names:
        run = ALGORITHMS[name](buffer)
        joined.run(name, run)
        sent, begun = joined.communicator.bytes_sent, time.perf_counter()
        for _ in range(repeats):
            joined.run(name, run)
        seconds = (time.perf_counter() - begun) / repeats
        figures[name] = {
            "seconds": seconds,
            "predicted": model.seconds(name, buffer.nbytes),
            "bytes": (joined.communicator.bytes_sent - sent) / repeats,
        }
    if joined.rank == 0:
        side_by_side.report(figures)


def measure_small_behind_large(mib):
    """Seconds of an all-reduce of 4 KiB: alone, and posted directly after a large one."""
    import numpy as np

    from tfdist.collectives import ring
    from tfdist.collectives.barrier import barrier

    joined = engine()
    small = np.zeros(1024, np.float32)
    large = joined.communicator.take(int(mib * 2**20)).view(np.float32)
    large[...] = 0
    seconds = {}
    for name in ("warm", "alone", "behind", "large"):
        joined.run("barrier", barrier())
        begun = time.perf_counter()
        pending = joined.post("large", ring.all_reduce(large)) if name in ("warm", "behind") else None
        joined.run("large alone" if name == "large" else "small", ring.all_reduce(large if name == "large" else small))
        seconds[name] = time.perf_counter() - begun
        if pending:
            joined.wait(pending)
    if joined.rank == 0:
        side_by_side.report(seconds)


def measure_fit(batch, steps):
    """`fit` of six layers: how much of its communication is hidden, and the time of a step with and without it."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = tfdist.AllReduceStrategy()
    with strategy.scope():
        layers = [keras.layers.Dense(1024, activation="relu") for _ in range(6)]
        model = keras.Sequential([keras.layers.Input((784,)), *layers, keras.layers.Dense(10)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x = np.random.default_rng(0).normal(size=(batch * strategy.size, 784)).astype("float32")
    data = tf.data.Dataset.from_tensors((x, np.zeros(len(x)))).repeat(steps).unbatch().batch(len(x))
    model.fit(data, epochs=1, verbose=0)
    report, ends = tfdist.callbacks.Communication(), []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(time.perf_counter()))
    model.fit(data, epochs=1, verbose=0, callbacks=[report, note])
    if strategy.rank == 0:
        figures = {name: values[0] for name, values in report.history.items()}
        side_by_side.report({**figures, "step": (ends[-1] - ends[0]) / (steps - 1)})


def main():
    options = side_by_side.parser(__doc__.partition("\n")[0])
    options.add_argument("--only", nargs="+", choices=("line", "hierarchy", "growth", "overlap"))
    options = options.parse_args()
    if not namespaces.AVAILABLE:
        sys.exit("needs root and iproute2 to make network namespaces")
    wanted = options.only or ("line", "hierarchy", "growth", "overlap")
    figures = {name: globals()[f"show_{name}"]() for name in wanted}
    side_by_side.save(options.json, figures)


def show_line():
    """The ring's utilization of a link of 1 Gbit/s."""
    with namespaces.hosts(2, "1gbit") as names:
        command = [__file__, "--measure=algorithms", "ring", "64", "3"]
        ring = on_hosts(names, [0, 1], command, namespaces.SETTINGS)["ring"]
        behind = on_hosts(names, [0, 1], [__file__, "--measure=behind", "64"], namespaces.SETTINGS)
    share = 8 * ring["bytes"] / ring["seconds"] / BITS["1gbit"]
    print(f"ring of 64 MiB on a link of 1 Gbit/s: {share:.1%} of the link")
    print(
        f"4 KiB: {behind['alone'] * 1e3:.1f} ms alone, {behind['behind'] * 1e3:.1f} ms behind 64 MiB, which take "
        f"{behind['large'] * 1e3:.0f} ms"
    )
    return {**ring, "share": share, "behind": behind}


def show_hierarchy():
    """Two hosts of two processes each."""
    settings = {
        **{name: value for name, value in namespaces.SETTINGS.items() if name != "MPIR_CVAR_NOLOCAL"},
        "MPIR_CVAR_NUM_CLIQUES": "2",
    }
    with namespaces.hosts(2, "1gbit") as names:
        command = [__file__, "--measure=algorithms", "ring,hierarchical", "32", "3"]
        figures = on_hosts(names, [0, 1, 0, 1], command, settings)
    flat, levels = figures["ring"], figures["hierarchical"]
    print(
        f"2 hosts of 2 processes, 32 MiB: hierarchical {flat['seconds'] / levels['seconds']:.2f} × as fast as the flat "
        f"ring; predicted {flat['predicted'] / levels['predicted']:.2f} ×"
    )
    return figures


def show_growth():
    """2 to 8 hosts, limited by the link and not by the processor."""
    figures = {}
    for size in (2, 4, 8):
        with namespaces.hosts(size, "200mbit") as names:
            command = [__file__, "--measure=algorithms", "ring,reduce_scatter_gather,butterfly,tree", "4", "2"]
            figures[size] = on_hosts(names, range(size), command, namespaces.SETTINGS)
        for name, row in figures[size].items():
            print(
                f"{size} hosts at 200 Mbit/s, 4 MiB, {name:22}: {row['seconds']:.3f} s, "
                f"{row['seconds'] / row['predicted']:.2f} × the model, {row['bytes'] / 2**20:.2f} MiB sent"
            )
    return figures


def show_overlap():
    """How much of the communication is hidden, depending on the computing time of a step."""
    rows = []
    steps = 10
    for batch in (128, 512, 1024, 2048):
        with namespaces.hosts(2, "1gbit") as names:
            command = [__file__, "--measure=fit", str(batch), str(steps)]
            alone = on_hosts(names, [0], command, {"TF_CONFIG": "{}"})
            two = on_hosts(names, [0, 1], command, namespaces.SETTINGS)
        row = {
            "batch": batch,
            "step_alone": alone["step"],
            "step": two["step"],
            "communicating": two["seconds_communicating"] / steps,
            "hidden": two["share_hidden"],
        }
        print(
            f"fit at 1 Gbit/s, batch {batch}: alone a step takes {row['step_alone'] * 1e3:.0f} ms, with two "
            f"{row['step'] * 1e3:.0f} ms, of which {row['communicating'] * 1e3:.0f} ms communicating; "
            f"{row['hidden']:.0%} hidden"
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    what = next((argument.split("=")[1] for argument in sys.argv if argument.startswith("--measure=")), None)
    if what == "algorithms":
        measure_algorithms(sys.argv[2].split(","), float(sys.argv[3]), int(sys.argv[4]))
    elif what == "behind":
        measure_small_behind_large(float(sys.argv[2]))
    elif what == "fit":
        measure_fit(int(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
