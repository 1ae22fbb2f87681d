"""Every algorithm over real MPI: sums, bit for bit; or, with TEST_ALGORITHM, the same sum until somebody dies."""

import os
import time

import numpy as np

import tfdist
from tfdist.cluster import discovery, world
from tfdist.cluster.settings import Timeouts
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.all_to_all import all_to_all
from tfdist.collectives.barrier import barrier
from tfdist.collectives.broadcast import broadcast
from tfdist.collectives.reduce_scatter import reduce_scatter
from tfdist.collectives.schedule import partition

joined = world.join(discovery.discover(None), Timeouts.from_environment())
engine, rank, size = joined.engine, joined.rank, joined.size


def exact():
    for name, all_reduce in ALGORITHMS.items():
        for length in (1, 1000, 300_001):
            buffer = np.arange(length, dtype=np.float64) + rank
            engine.run(f"{name} {length}", all_reduce(buffer))
            assert (buffer == size * np.arange(length) + size * (size - 1) / 2).all(), name
        value = np.random.default_rng(rank).normal(size=10_000).astype(np.float32)
        engine.run(f"{name} bits", all_reduce(value))
        everyone, _ = engine.run(f"{name} compare", all_gather_rows(value[np.newaxis]))
        assert all(row.tobytes() == value.tobytes() for row in everyone), f"{name} differs between ranks"
    buffer = np.full(101, 1.0)
    part = engine.run("reduce-scatter", reduce_scatter([buffer[part] for part in partition(101, size)]))
    assert len(part) == len(range(101)[partition(101, size)[rank]])
    assert (part == size).all()
    given = [np.full(3, 10.0 * rank + target) for target in range(size)]
    taken = [np.empty(3) for _ in range(size)]
    engine.run("all-to-all", all_to_all(given, taken))
    assert [row[0] for row in taken] == [10.0 * source + rank for source in range(size)]
    root = np.full(7, float(rank))
    engine.run("broadcast", broadcast(root, root=size - 1))
    assert (root == size - 1).all()
    engine.run("barrier", barrier())


def forever(name):
    buffer = np.zeros(1 << 20, np.float32)
    print("READY", flush=True)
    try:
        while True:
            engine.run(name, ALGORITHMS[name](buffer))
    except tfdist.TfdistError as error:
        print("NOTICED", time.monotonic(), flush=True)
        print("ERROR", type(error).__name__, error, flush=True)
        raise


if os.environ.get("TEST_DIFFERENT"):
    engine.run(f"sum of rank {rank}", ALGORITHMS["ring"](np.ones(10)))
if name := os.environ.get("TEST_ALGORITHM"):
    forever(name)
exact()
print("DONE", flush=True)
