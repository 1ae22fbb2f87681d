"""Scaling of compression: 2 to 16 hosts at 100 Mbit/s, one gradient of 2048 × 2048 float32.

    python benchmarks/compression_growth.py [--hosts 2 4 8 16] [--methods …]

A ring sends about twice the vector, for any number of hosts; gathered payloads are sent to every other host. Seconds
include the work of all hosts on this machine's cores; the same sums over shared memory show how much that is.
Needs root and iproute2: the hosts are network namespaces, which the script makes and removes.
"""

import statistics
import sys
import time
from pathlib import Path

import side_by_side

sys.path.insert(0, str(Path(__file__).parent.parent))

SHAPE = 2048, 2048
WARM, STEPS = 2, 3


def methods():
    from tfdist import compression as c

    return {
        "none": None,
        "Int8": c.Int8(),
        "TernGrad": c.TernGrad(block=512),
        "TopK 1 %": c.TopK(0.01),
        "DGC 0.1 %": c.DeepGradientCompression(0.001, 0.9),
        "Strom 1/400": c.Strom(density=1 / 400),
        "PowerSGD(2)": c.PowerSGD(2),
    }


def measure(names):
    """Seconds and bytes sent per step, by method."""
    import network
    import numpy as np

    from tfdist.collectives import ring
    from tfdist.collectives.barrier import barrier
    from tfdist.compression import compressor

    engine = network.engine()
    gradient = np.random.default_rng(engine.rank).standard_t(4, size=SHAPE).astype(np.float32)
    vector, out = 1e-3 * gradient.reshape(-1), np.empty(gradient.size, np.float32)
    figures = {}
    for name in names:
        method = methods()[name]
        if method is not None:
            known = compressor.Compressor(method, engine.rank, engine.size)
            known.register({"x": ("layer/kernel", SHAPE)})
            tensor = known.tensor("x", gradient)
        seconds, sent = [], []
        for step in range(WARM + STEPS):
            plan = (
                ring.all_reduce(out, source=vector)
                if method is None
                else compressor.begin([tensor], vector, out, lambda nbytes: "ring")
            )
            engine.run(f"barrier {name} {step}", barrier())
            before, begun = engine.communicator.bytes_sent, time.perf_counter()
            engine.run(f"{name} {step}", plan)
            seconds.append(time.perf_counter() - begun)
            sent.append(engine.communicator.bytes_sent - before)
        figures[name] = {"seconds": statistics.median(seconds[WARM:]), "bytes": statistics.median(sent[WARM:])}
    if engine.rank == 0:
        side_by_side.report(figures)


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--methods", nargs="+", default=list(methods()))
    options = parser.parse_args()
    import network

    from tests.multiprocess import namespaces

    figures = {"rate": options.rate, "hosts": {}}
    command = [__file__, "--measure", *options.methods]
    for size in options.hosts:
        with namespaces.hosts(size, options.rate) as names:
            line = network.on_hosts(names, range(size), command, namespaces.SETTINGS)
        memory = side_by_side.measure(command, size, way="tfdist")
        figures["hosts"][size] = {
            name: {**line[name], "in memory": memory[name]["seconds"]} for name in options.methods
        }
        rows = [
            (
                name,
                {
                    "ms": 1e3 * row["seconds"],
                    "times faster": line["none"]["seconds"] / row["seconds"],
                    "times smaller": line["none"]["bytes"] / row["bytes"],
                    "ms in memory": 1e3 * row["in memory"],
                },
            )
            for name, row in figures["hosts"][size].items()
        ]
        side_by_side.table(rows, list(rows[0][1]), f"{size} hosts at {options.rate}")
        side_by_side.save(options.json, figures)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(sys.argv[sys.argv.index("--measure") + 1 :])
    else:
        main()
