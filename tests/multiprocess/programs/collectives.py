"""Every algorithm over real MPI: sums, bit for bit, calls that do not fit each other, and sums until somebody dies."""

import os

import ml_dtypes
import numpy as np
from checking import run_checks
from told import Told

import tfdist
from tfdist.cluster import discovery
from tfdist.cluster.settings import Timeouts
from tfdist.collectives.algorithms import ALGORITHMS
from tfdist.collectives.all_gather import all_gather_rows
from tfdist.collectives.all_to_all import all_to_all
from tfdist.collectives.barrier import barrier
from tfdist.collectives.broadcast import broadcast
from tfdist.collectives.reduce_scatter import reduce_scatter
from tfdist.collectives.schedule import partition
from tfdist.engine.group import ProcessGroup
from tfdist.runtime import world

entered = world.enter(discovery.discover(None), Timeouts.from_environment())
engine, rank, size = entered.engine, entered.rank, entered.size


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


def same_bits():
    """Where the operands of a combination may not be swapped; small and, within a machine, large ones."""
    generator = np.random.default_rng(rank)
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    for name, all_reduce in ALGORITHMS.items():
        for combine in (np.minimum, np.maximum, np.add, np.multiply):
            for kind in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64):
                for length in (101, 100_001):
                    parts = generator.standard_normal(2 * length)
                    parts[::3] = odd[generator.integers(0, len(odd), len(parts[::3]))]
                    pairs = np.ascontiguousarray(parts.astype(np.float32).view(np.complex64))
                    value = pairs if kind is np.complex64 else pairs.real.astype(kind)
                    key = f"{name} {combine.__name__} {np.dtype(kind)} {length}"
                    engine.run(key, all_reduce(value, combine))
                    if name == "mpi":  # whose own sums keep the sign of one rank's NaN
                        value[np.isnan(value)] = np.nan
                    everyone, _ = engine.run(f"{key} compare", all_gather_rows(value.view(np.uint8)[np.newaxis]))
                    assert all((row == everyone[0]).all() for row in everyone), f"{key} differs between ranks"


def forever():
    name = os.environ["TEST_ALGORITHM"]
    buffer = np.zeros(1 << 20, np.float32)
    print("READY", flush=True)
    try:
        while True:
            engine.run(name, ALGORITHMS[name](buffer))
    except tfdist.TfdistError as error:
        print("ERROR", type(error).__name__, error, flush=True)
        raise


def in_the_librarys_order():
    """Ranks post the library's own all-reduces in orders of their own; also of what MPI has no type for."""
    mpi, everyone = ALGORITHMS["mpi"], range(size)
    kinds = [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.complex64, np.float64]
    for place in range(len(kinds)):  # the ranks agree on keys one after the other
        engine.run(f"mpi {place}", mpi(np.zeros(50)))
    buffers = [np.arange(30).astype(kind) for kind in kinds]
    order = np.random.default_rng(rank).permutation(len(kinds))
    pending = [engine.post(f"mpi {place}", mpi(buffers[place])) for place in order]
    for operation in pending:
        engine.wait(operation)
    for buffer in buffers:
        assert (buffer.astype(np.complex128) == size * np.arange(30)).all(), buffer
    spoilt = np.array([np.nan if rank == 0 else 1.0, np.inf, rank], np.float32)
    engine.run("mpi maximum", mpi(spoilt, np.maximum))
    assert np.isnan(spoilt[0])
    assert spoilt[2] == max(everyone)


def groups():
    """Groups that overlap sum under one key, of other lengths, at the same time; every algorithm that can."""
    members = tuple(r for r in range(size) if r % 2 == rank % 2)
    overlapping = [
        ProcessGroup(engine),
        ProcessGroup(engine, members),
        ProcessGroup(engine, (rank,)),
        ProcessGroup(engine, tuple(reversed(range(size)))),
    ]
    for name in sorted(set(ALGORITHMS) - {"mpi"}):
        posted = []
        for place in np.random.default_rng(rank).permutation(len(overlapping)):
            buffer = np.full(50_000 * (1 + place), float(rank))
            posted.append(
                (overlapping[place], buffer, overlapping[place].post(name, ALGORITHMS[name](buffer), str(buffer.shape)))
            )
        for group, buffer, pending in posted:
            group.wait(pending)
            assert (buffer == sum(group.members)).all(), (name, group)


def new_keys():
    """A hundred new keys, posted in an order of its own by each rank before any is waited for; thirty calls of one."""
    numbers = np.random.default_rng(rank).permutation(100)
    buffers = {number: np.full(10, float(number)) for number in numbers}
    posted = [engine.post(f"new {number}", ALGORITHMS["ring"](buffers[number])) for number in numbers]
    calls = [np.full(1000, float(call)) for call in range(30)]
    posted += [engine.post("one key", ALGORITHMS["butterfly"](buffer)) for buffer in calls]
    for pending in reversed(posted):
        engine.wait(pending)
    assert all((buffer == size * number).all() for number, buffer in buffers.items())
    assert all((buffer == size * call).all() for call, buffer in enumerate(calls))


def late():
    """Rank 1 takes part when it is told that it is missing: once while the key is new, and once when it is known."""
    told = Told()
    for call in (1, 2):
        if rank == 1:
            told.wait_for(f"(call {call}: kernel, bias); missing: rank 1.", 2)
        engine.run("a sum that one is late for", ALGORITHMS["ring"](np.ones(10)), contents="kernel, bias")


def different_later():
    """Both keys are known; then ranks use different ones."""
    for key in ("sum", "other sum"):
        engine.run(key, ALGORITHMS["ring"](np.ones(10)))
    engine.run("sum" if rank == 0 else "other sum", ALGORITHMS["ring"](np.ones(10)))


def different_sizes():
    """The same key with more elements on one rank, once the key is known."""
    elements = int(os.environ["TEST_SIZES"])
    engine.run("sum", ALGORITHMS["ring"](np.ones(2 * elements)))
    engine.run("sum", ALGORITHMS["ring"](np.ones((2 + 2 * rank) * elements)))


def different():
    """Each rank its own key."""
    engine.run(f"sum of rank {rank}", ALGORITHMS["ring"](np.ones(10)))


run_checks(globals())
