"""Tests that hold for every all-reduce algorithm; `test_ring.py` has those of the ring."""

import math

import ml_dtypes
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import algorithms
from tfdist.collectives.algorithms import ALGORITHMS

SIMULATED = {name: all_reduce for name, all_reduce in ALGORITHMS.items() if name != "mpi"}
"""The library's own needs the library: `tests/multiprocess/test_collectives.py`."""

SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 13, 16]


def vectors(size, length, dtype, seed=0):
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 5, length).astype(dtype) for _ in range(size)]


@pytest.fixture(params=SIMULATED)
def all_reduce(request):
    return ALGORITHMS[request.param]


@pytest.mark.parametrize("size", SIZES)
def test_sum_is_exact(all_reduce, size):
    for length in (0, 1, 2, 15, 64, 1001):
        buffers = vectors(size, length, np.float32)
        expected = np.sum(buffers, axis=0, dtype=np.float64)
        simulate(size, lambda rank, buffers=buffers: all_reduce(buffers[rank]))
        for buffer in buffers:
            assert (buffer == expected).all()


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_sum_is_exact_in_many_segments(all_reduce, size):
    for length in (64, 1001):
        buffers = vectors(size, length, np.float32)
        expected = np.sum(buffers, axis=0, dtype=np.float64)
        simulate(size, lambda rank, buffers=buffers: all_reduce(buffers[rank]), segment_bytes=64)
        for buffer in buffers:
            assert (buffer == expected).all()


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float64", "complex64", ml_dtypes.bfloat16])
def test_sum_is_exact_for_every_dtype(all_reduce, dtype):
    buffers = vectors(5, 100, dtype)
    expected = np.sum([buffer.astype("complex128") for buffer in buffers], axis=0)
    simulate(5, lambda rank: all_reduce(buffers[rank]))
    for buffer in buffers:
        assert (buffer.astype("complex128") == expected).all()


@pytest.mark.parametrize("combine", [np.add, np.multiply, np.minimum, np.maximum])
def test_products_minima_and_maxima_equal_numpys(all_reduce, combine):
    buffers = vectors(6, 77, np.int64)
    expected = combine.reduce(buffers)
    simulate(6, lambda rank: all_reduce(buffers[rank], combine))
    for buffer in buffers:
        assert (buffer == expected).all()


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_source_is_only_read(all_reduce, size):
    sources = vectors(size, 101, np.float32)
    for source in sources:
        source.flags.writeable = False
    results = [np.full(101, np.nan, np.float32) for _ in range(size)]
    simulate(size, lambda rank: all_reduce(results[rank], source=sources[rank]))
    for result in results:
        assert (result == np.sum(sources, axis=0)).all()


@pytest.mark.parametrize("size", SIZES)
def test_result_is_identical_on_all_ranks_and_from_run_to_run(all_reduce, size):
    generator = np.random.default_rng(1)
    first = [generator.normal(size=999).astype(np.float32) for _ in range(size)]
    again = [buffer.copy() for buffer in first]
    for buffers in (first, again):
        simulate(size, lambda rank, buffers=buffers: all_reduce(buffers[rank]))
    for buffer in (*first, *again):
        assert buffer.tobytes() == first[0].tobytes()


def test_overflow_gives_infinity_and_nan_is_kept(all_reduce):
    buffers = [np.array([3e38, np.inf, np.nan, 1.0], np.float32) for _ in range(3)]
    with np.errstate(all="ignore"):
        simulate(3, lambda rank: all_reduce(buffers[rank]))
    for buffer in buffers:
        assert np.isposinf(buffer[:2]).all()
        assert np.isnan(buffer[2])
        assert buffer[3] == 3.0


# Messages and bytes sent per process, for P a power of two (ring and naive: any P).

LENGTH = 16 * 15 * 14


def per_process(name, size):
    rounds = int(math.log2(size))
    return {
        "ring": (2 * (size - 1), 2 * LENGTH * (size - 1) // size),
        "naive": (size - 1, LENGTH * (size - 1)),
        "butterfly": (rounds, LENGTH * rounds),
        "reduce_scatter_gather": (2 * rounds, 2 * LENGTH * (size - 1) // size),
    }[name]


@pytest.mark.parametrize("name", ["ring", "naive", "butterfly", "reduce_scatter_gather"])
@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_messages_and_bytes_equal_the_formulas(name, size):
    buffers = vectors(size, LENGTH, np.float32)
    _, communicators = simulate(size, lambda rank: ALGORITHMS[name](buffers[rank]))
    messages, elements = per_process(name, size)
    for communicator in communicators:
        assert communicator.messages_sent == messages
        assert communicator.bytes_sent == 4 * elements


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 16])
def test_tree_messages_and_bytes_equal_the_formulas(size):
    buffers = vectors(size, LENGTH, np.float32)
    _, communicators = simulate(size, lambda rank: ALGORITHMS["tree"](buffers[rank]))
    assert communicators[0].messages_sent == math.ceil(math.log2(size)), "the root's broadcast"
    assert sum(communicator.messages_sent for communicator in communicators) == 2 * (size - 1)
    for communicator in communicators:
        assert communicator.bytes_sent == 4 * LENGTH * communicator.messages_sent


def test_unknown_algorithm_names_raise():
    for name in (*ALGORITHMS, "auto"):
        algorithms.check(name)
    with pytest.raises(ValueError, match=r"algorithm must be one of ring, .* or auto; got 'rings'"):
        algorithms.check("rings")
    with pytest.raises(ValueError, match="'mpi' runs among all processes of a job, not in a group"):
        algorithms.check("mpi", group=True)


def test_auto_chooses_by_size_and_machines():
    assert algorithms.choose("auto", (0,) * 8, 64) == "butterfly"
    assert algorithms.choose("auto", (0, 0, 1, 1), 64 << 20) == "hierarchical"
    assert algorithms.choose("tree", (0, 0, 1, 1), 64 << 20) == "tree"
