"""Routes for casts and block quantizers: the error and time of three routes, measured on real processes.

    python benchmarks/compression_routes.py [--processes 2 4 8] [--elements 4000000]

- *hops*: along a ring that decodes, adds and encodes at each hop.
- *exchange*: each rank receives the same part of every vector, adds the parts, and encodes the sum again.
- *gather*: every rank receives all vectors and adds them. tfdist uses it for two ranks, and *exchange* for more.

The error is that of the sum, without feedback: its norm relative to the sum's. All three give bitwise equal sums on all
ranks.
"""

import statistics
import sys
import time

import side_by_side

REPEATS = 7


def methods():
    from tfdist import compression as c

    return [c.Float16(), c.BFloat16(), c.Float8(), c.Int8(), c.Int4(), c.QSGD(127), c.OneBit()]


def along_hops(method, vector, out):
    """A plan for the engine: a ring all-reduce of payloads."""
    from tfdist import compression as c
    from tfdist.collectives.schedule import partition
    from tfdist.collectives.transfer import exchange

    def schedule(comm, tag):
        import numpy as np

        right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        parts = partition(vector.size, comm.size)
        states = [c.State("x", comm.rank, comm.size) for _ in parts]
        np.copyto(out, vector)

        def arriving(part):
            return np.empty(method.encode_zeros(part.stop - part.start, vector.dtype, states[0]).size, np.uint8)

        def pass_on(payload, place):
            arrived = arriving(parts[place])
            yield from exchange(comm, tag, outgoing=payload, destination=right, target=arrived, source=left)
            return arrived

        for step in range(comm.size - 1):
            given, place = (comm.rank - step) % comm.size, (comm.rank - step - 1) % comm.size
            arrived = yield from pass_on(method.encode(out[parts[given]], states[given]), place)
            method.decode(arrived, out[parts[place]], np.add)
        place = (comm.rank + 1) % comm.size
        payload = method.encode(out[parts[place]], states[place])
        method.decode(payload, out[parts[place]])
        for _ in range(comm.size - 1):
            place = (place - 1) % comm.size
            payload = yield from pass_on(payload, place)
            method.decode(payload, out[parts[place]])

    return schedule


def measure(elements):
    import numpy as np

    import tfdist
    from tfdist import compression as c
    from tfdist.collectives.barrier import barrier
    from tfdist.compression import reduction
    from tfdist.compression.fusion import Traffic, fuse_reductions
    from tfdist.compression.method import Route
    from tfdist.runtime import world

    tfdist.init()
    rank, size, engine = tfdist.rank(), tfdist.size(), world.current().engine
    normals = [np.random.default_rng(seed).standard_normal(elements) for seed in range(size)]
    vectors = [(1e-3 * normal).astype(np.float32) for normal in normals]
    exact = np.sum(vectors, axis=0, dtype=np.float64)
    out = np.empty(elements, np.float32)
    figures = {}
    for method in methods():
        state = c.State("x", rank, size)

        def along(route, method=method, state=state):
            tensor_reduction = reduction.reduce_on_route(route, method, vectors[rank], out, state)
            return fuse_reductions([(tensor_reduction, Traffic())], lambda nbytes: "ring")

        ways = {
            "hops": lambda method=method: along_hops(method, vectors[rank], out),
            "exchange": lambda along=along: along(Route.EXCHANGE),
            "gather": lambda along=along: along(Route.GATHER),
        }
        figures[str(method)] = {}
        for way, plan in ways.items():
            seconds = []
            for repeat in range(REPEATS):
                engine.run(f"barrier {method} {way} {repeat}", barrier())
                begun = time.perf_counter()
                engine.run(f"{method} {way} {repeat}", plan())
                seconds.append(time.perf_counter() - begun)
            error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
            figures[str(method)][way] = {"error": error, "seconds": statistics.median(seconds)}
    if rank == 0:
        side_by_side.report(figures)


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--elements", type=int, default=4_000_000)
    options = parser.parse_args()
    results = {}
    for size in options.processes:
        results[size] = side_by_side.measure([__file__, "--measure", str(options.elements)], size, way="tfdist")
        columns = {"error, %": lambda row: 100 * row["error"], "ms": lambda row: 1e3 * row["seconds"]}
        rows = [
            (
                name,
                {f"{way} {unit}": value(row) for way, row in ways.items() for unit, value in columns.items()},
            )
            for name, ways in results[size].items()
        ]
        side_by_side.table(rows, list(rows[0][1]), f"{size} processes, {options.elements:,} elements")
    side_by_side.save(options.json, {"elements": options.elements, "processes": results})


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(int(sys.argv[-1]))
    else:
        main()
