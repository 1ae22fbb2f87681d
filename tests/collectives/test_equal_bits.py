"""Results are bitwise equal on all ranks, also for ufuncs whose operands may not be swapped."""

import os

import ml_dtypes
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives.algorithms import ALGORITHMS

SIMULATED = sorted(set(ALGORITHMS) - {"mpi"})
SIZES = range(1, 10)
"""Numbers of ranks. A third of them is always run, which depends on the algorithm and on the type."""
LENGTH = 301
"""Not a multiple of any vector register's length, so that NumPy's loops end with single elements."""

FLOATS = [np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float32, np.float64]
COMPLEX = [np.complex64, np.complex128]
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]

UFUNCS = {
    name: getattr(np, name)
    for name in (
        "add multiply minimum maximum fmin fmax hypot logaddexp logaddexp2 "
        "bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor gcd lcm"
    ).split()
}


def any_bits(size, dtype):
    """Vectors of random bits, half of them zeros, infinities and NaN of both signs; at addresses of any alignment."""
    generator = np.random.default_rng(size)
    itemsize = np.dtype(dtype).itemsize
    vectors = []
    for rank in range(size):
        room = generator.integers(0, 256, (LENGTH + 64) * itemsize, np.uint8)
        start = itemsize * (rank * 5 % 7)
        vector = room[start : start + LENGTH * itemsize].view(dtype)
        if np.dtype(dtype).kind not in "iu":
            part = vector.view(vector.real.dtype) if np.dtype(dtype).kind == "c" else vector
            odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0], np.float32).astype(part.dtype)
            chosen = generator.random(part.size) < 0.5
            part[chosen] = odd[generator.integers(0, len(odd), chosen.sum())]
        vectors.append(vector)
    return vectors


def takes(ufunc, dtype):
    """Whether a ufunc combines two such numbers into one."""
    try:
        with np.errstate(all="ignore"):
            ufunc(np.ones(1, dtype), np.ones(1, dtype), out=np.ones(1, dtype))
    except TypeError:
        return False
    return True


CASES = [
    pytest.param(ufunc, dtype, id=f"{name}-{np.dtype(dtype)}")
    for name, ufunc in UFUNCS.items()
    for dtype in (*FLOATS, *COMPLEX, *INTEGERS)
    if takes(ufunc, dtype)
]


@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize(("ufunc", "dtype"), CASES)
def test_all_ranks_end_with_the_same_bits(name, ufunc, dtype):
    place = SIMULATED.index(name) + np.dtype(dtype).num
    for size in SIZES if os.environ.get("TEST_SWEEP") else SIZES[place % 3 :: 3]:
        given, results = any_bits(size, dtype), any_bits(size, dtype)

        def plan(rank, given=given, results=results):
            """In place on every third rank."""
            return ALGORITHMS[name](results[rank], ufunc, source=given[rank] if rank % 3 else None)

        with np.errstate(all="ignore"):
            simulate(size, plan, hosts=tuple(rank // 2 for rank in range(size)))
        for result in results:
            assert result.tobytes() == results[0].tobytes()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_butterfly_combines_in_the_order_of_the_ranks(size):
    """NumPy keeps one of two zeros or two NaN by its position; a butterfly keeps the same one as a single rank."""
    first, second = (np.array([0.0, -0.0], np.float32), np.array([-0.0, 0.0], np.float32))
    given = [first, *[second] * (size - 1)]
    expected = first
    for vector in given[1:]:
        expected = np.minimum(expected, vector)
    results = [vector.copy() for vector in given]
    simulate(size, lambda rank: ALGORITHMS["butterfly"](results[rank], np.minimum))
    for result in results:
        assert result.tobytes() == expected.tobytes()
