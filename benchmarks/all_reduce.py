"""All-reduce of a float32 vector: tfdist inside a tf.function and other implementations, in one run.

python benchmarks/all_reduce.py
python benchmarks/all_reduce.py --processes 4
"""

import json
import os
import sys
import time

import side_by_side

MIB = (0.0625, 1, 4, 16, 64)


def repeats(mib):
    return min(100, max(5, int(128 / mib)))


def rates(make, barrier):
    """GB/s by size: ``make(elements)`` returns the function to time."""
    gb_per_s = {}
    for mib in MIB:
        run = make(int(mib * 2**20 // 4))
        run()
        run()
        barrier()
        begun = time.perf_counter()
        for _ in range(repeats(mib)):
            run()
        barrier()
        gb_per_s[mib] = mib * 2**20 * repeats(mib) / (time.perf_counter() - begun) / 1e9
    return gb_per_s


def step_in_graph(strategy, vector):
    import tensorflow as tf

    @tf.function
    def step():
        def replica():
            return tf.distribute.get_replica_context().all_reduce("SUM", vector.read_value())

        return strategy.run(replica)

    return step


def measure_tfdist():
    import numpy as np
    import tensorflow as tf

    import tfdist
    from tfdist.collectives import ring

    strategy = tfdist.AllReduceStrategy(algorithm="ring")
    engine = strategy.extended.group.engine

    def barrier():
        engine.run("barrier", ring.all_reduce(np.zeros(strategy.size)))

    def in_graph(elements):
        return step_in_graph(strategy, tf.Variable(tf.ones([elements])))

    def from_source(elements):
        source = np.zeros(elements, np.float32)

        def run():
            result = engine.communicator.take(source.nbytes).view(np.float32)
            engine.run(f"from source {elements}", ring.all_reduce(result, source=source))

        return run

    def bare(elements):
        buffer = engine.communicator.take(4 * elements).view(np.float32)
        buffer[...] = 0
        return lambda: engine.run(f"bare {elements}", ring.all_reduce(buffer))

    figures = {
        "tfdist, in a tf.function": rates(in_graph, barrier),
        "tfdist's bare ring, of memory that it may not write": rates(from_source, barrier),
        "tfdist's bare ring, in place": rates(bare, barrier),
    }
    if strategy.rank == 0:
        side_by_side.report(figures)


def measure_tensorflow(rank, size, port):
    cluster = {"worker": [f"127.0.0.1:{port + index}" for index in range(size)]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    import tensorflow as tf

    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)

    def in_graph(elements):
        with strategy.scope():
            step = step_in_graph(strategy, tf.Variable(tf.ones([elements])))
        return lambda: step().numpy()[0]

    gb_per_s = rates(in_graph, lambda: None)
    if rank == 0:
        side_by_side.report({"TensorFlow RING, in a tf.function": gb_per_s})


def measure_gloo(rank, size, port):
    import torch
    import torch.distributed

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=size)

    def make(elements):
        vector = torch.ones(elements)
        return lambda: torch.distributed.all_reduce(vector)

    gb_per_s = rates(make, torch.distributed.barrier)
    torch.distributed.destroy_process_group()
    if rank == 0:
        side_by_side.report({"PyTorch Gloo": gb_per_s})


def measure_mpi():
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    cores = sorted(os.sched_getaffinity(0))
    if comm.size <= len(cores):
        os.sched_setaffinity(0, {cores[comm.rank]})

    def make(elements):
        vector = np.zeros(elements, np.float32)
        return lambda: comm.Allreduce(MPI.IN_PLACE, vector)

    figures = {"MPI_Allreduce in place": rates(make, comm.Barrier)}
    a, b = np.zeros(16 << 20, np.float32), np.zeros(16 << 20, np.float32)
    seconds = {}
    for name, operation in (("copy", lambda: np.copyto(b, a)), ("add", lambda: np.add(b, a, out=b))):
        operation()
        comm.Barrier()
        begun = time.perf_counter()
        for _ in range(5):
            operation()
        comm.Barrier()
        seconds[name] = (time.perf_counter() - begun) / 5 / a.nbytes
    # Two ranks that share memory must each add half of the buffer and copy half of it.
    figures["the machine's bound"] = {64: 1 / (seconds["copy"] / 2 + seconds["add"] / 2) / 1e9}
    if comm.rank == 0:
        side_by_side.report(figures)


def main():
    parser = side_by_side.parser(__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--runs", type=int, default=3, help="number of runs, of which the best is taken for every implementation"
    )
    options = parser.parse_args()
    size, here = options.processes, __file__
    ways = [("tfdist", "tfdist"), ("tensorflow", "plain"), ("mpi", "mpiexec")]
    if side_by_side.installed("torch"):
        ways.append(("gloo", "plain"))
    figures = {}
    for _ in range(options.runs):
        for name, way in ways:
            for row, values in side_by_side.measure([here, f"--measure={name}"], size, way=way).items():
                best = figures.setdefault(row, {})
                for mib, rate in values.items():
                    best[float(mib)] = max(rate, best.get(float(mib), 0.0))
    side_by_side.table(list(figures.items()), MIB, f"GB/s by MiB, {size} processes")
    ours = figures["tfdist, in a tf.function"]
    ratios = [
        (f"tfdist : {row}", {mib: ours[mib] / rate for mib, rate in values.items()})
        for row, values in figures.items()
        if values is not ours
    ]
    side_by_side.table(ratios, MIB, "ratios")
    side_by_side.save(options.json, {"processes": size, "gb_per_s": figures})


if __name__ == "__main__":
    what = next((argument.split("=")[1] for argument in sys.argv if argument.startswith("--measure=")), None)
    if what in ("tfdist", "mpi"):
        {"tfdist": measure_tfdist, "mpi": measure_mpi}[what]()
    elif what:
        {"tensorflow": measure_tensorflow, "gloo": measure_gloo}[what](*map(int, sys.argv[-3:]))
    else:
        main()
