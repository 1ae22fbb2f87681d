"""Means of what several processes give, against exact arithmetic; the sums are simulated."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.engine import operations
from tfdist.engine.means import Mean

rng = np.random.default_rng(0)
FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def summed(vectors, divisions=None, **world):
    totals = [np.empty_like(vector) for vector in vectors]
    divisions = divisions or [None] * len(vectors)

    def plan(rank):
        return operations.all_reduce(totals[rank], "ring", source=vectors[rank], division=divisions[rank]).plan

    with np.errstate(all="ignore"):
        simulate(len(vectors), plan, **world)
    for total in totals:
        assert total.tobytes() == totals[0].tobytes()
    return totals[0]


def mean(arrays):
    """The mean, and the number of sums it needed; divided afterwards and on the way, which makes no difference."""
    made = [Mean(array, len(arrays)) for array in arrays]
    sums = []

    def again(_):
        sums.append("again")
        scale = made[0].summed.dtype.type(2.0 ** -((len(arrays) - 1).bit_length()))
        return summed([rank_mean.summed * scale for rank_mean in made])

    vectors = [rank_mean.summed for rank_mean in made]
    result = made[0].finished(summed(vectors), again)
    assert result.dtype == arrays[0].dtype
    needed = 1 + len(sums)
    if (divisions := [rank_mean.division("ring") for rank_mean in made])[0] is not None:
        sums.clear()
        divided = made[0].finished(summed(vectors, divisions), again, is_divided=True)
        np.testing.assert_array_equal(divided, result)
        assert needed == 1 + len(sums)
    return result, needed


def largest(dtype):
    return float(ml_dtypes.finfo(dtype).max)


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_mean_that_is_representable_does_not_overflow(size, dtype):
    arrays = [np.array([largest(dtype), -largest(dtype), 0.75 * largest(dtype), 1.0]).astype(dtype)] * size
    result, sums = mean(arrays)
    precision = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(result.astype(np.float64), arrays[0].astype(np.float64), rtol=size * precision)
    assert sums == (1 if size == 1 else 2)


def test_mean_of_halves_whose_sum_overflows_is_exact():
    np.testing.assert_array_equal(mean([np.full(3, 40_000, np.float16)] * 2)[0], 40_000)


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_means_do_not_overflow(dtype):
    most = np.finfo(dtype).max
    result, _ = mean([np.array([most + 1j, 1 - most * 1j, 3 + 4j], dtype)] * 3)
    np.testing.assert_allclose(result.real, [most, 1, 3], rtol=1e-6)
    np.testing.assert_allclose(result.imag, [1, -most, 4], rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_mean_without_overflow_equals_sum_divided_by_size(dtype):
    """Bitwise, also for the smallest numbers; and in one sum."""
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    arrays = [np.append(rng.standard_normal(40_000), [smallest, 3 * smallest, -0.0]).astype(dtype) for _ in range(4)]
    result, sums = mean(arrays)
    np.testing.assert_array_equal(result, (summed(arrays).astype(np.float64) / 4).astype(dtype))
    assert sums == 1


def test_overflow_of_partial_sums_only_gives_the_exact_mean():
    """The sum of some processes overflows, that of all does not; other elements do not change."""
    arrays = [np.array([value, 1.0], np.float32) for value in (3e38, 3e38, -3e38, -3e38)]
    np.testing.assert_array_equal(mean(arrays)[0], [0, 1])


def test_infinity_and_nan_stay():
    arrays = [np.array([np.inf, np.inf, np.nan, 2.0], np.float32), np.array([1.0, -np.inf, 1.0, 4.0], np.float32)]
    np.testing.assert_array_equal(mean(arrays)[0], [np.inf, np.nan, np.nan, 3])


@pytest.mark.parametrize("size", range(1, 10))
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_integers_are_rounded_towards_zero(size, dtype):
    limits = np.iinfo(dtype)
    ends = np.array([limits.min, limits.max, limits.min + 1, limits.max - 1, 0, 1], dtype)
    arrays = [
        np.concatenate([ends, rng.permutation(ends), rng.integers(limits.min, limits.max, 50, dtype, endpoint=True)])
        for _ in range(size)
    ]
    result, sums = mean(arrays)
    for place, value in enumerate(result):
        exact = Fraction(sum(int(array[place]) for array in arrays), size)
        assert int(value) == int(exact)  # which rounds towards zero
    assert sums == 1


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("rank", [0, 1, -1])
def test_overflow_of_any_chunk_is_seen_by_all(size, rank):
    """At the end of the chunk, whose first element tells of it."""
    array = np.ones(size * 70_001, np.float32)
    array[(rank % size + 1) * 70_001 - 1] = 3e38
    result, sums = mean([array] * size)
    np.testing.assert_allclose(result, array, rtol=1e-6)
    assert sums == 2


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("signs", [(1, 1, -1), (-1, -1, 1), (1, -1, -1)])
def test_an_overflow_on_the_way_is_seen(dtype, signs):
    """Two ranks add numbers whose sum overflows, though the mean over three ranks is small."""
    arrays = [np.ones(70_001, dtype) for _ in signs]
    for array, sign in zip(arrays, signs, strict=True):
        array[[7, 40_000, -1]] = sign * largest(dtype)
    result, _ = mean(arrays)
    expected = np.ones(70_001)
    expected[[7, 40_000, -1]] = largest(dtype) * sum(signs) / 3
    np.testing.assert_allclose(result.astype(np.float64), expected, rtol=3 * float(ml_dtypes.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("place", [7, 20_000, 69_999])
def test_an_overflow_in_any_segment_is_seen(dtype, place):
    """Vectors cross in several messages, and each one tells of its own overflow."""
    arrays = [np.ones(70_000, dtype) for _ in range(4)]
    for array in arrays:
        array[place] = largest(dtype)  # the first addition overflows, and the others add to an infinity
    made = [Mean(array, 4) for array in arrays]
    divided = summed(arrays, [rank_mean.division("ring") for rank_mean in made], segment_bytes=4096)
    marked = [start for start in range(0, 70_000, 17_500) if np.isnan(divided[start])]
    assert marked == [place // 17_500 * 17_500]


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinities_that_are_given_within_a_part_are_no_overflow(value):
    arrays = [np.array([1.0, value, 3.0, 4.0], np.float32), np.ones(4, np.float32)]
    divisions = [Mean(array, 2).division("ring") for array in arrays]
    divided = summed([array.copy() for array in arrays], divisions)
    np.testing.assert_array_equal(divided, [1.0, value, 2.0, 2.5])


def test_integers_and_other_algorithms_are_divided_afterwards():
    assert Mean(np.ones(3, np.int32), 2).division("ring") is None
    assert Mean(np.ones(3), 2).division("tree") is None


def test_overflow_in_one_part_repeats_the_sum_everywhere():
    """As in a reduce-scatter: one process's part overflows, so all processes sum again."""
    arrays = [np.array([60_000, 1.0], np.float16), np.array([50_000, 3.0], np.float16)]
    made = [Mean(array, 2) for array in arrays]
    with np.errstate(all="ignore"):
        total = made[0].summed + made[1].summed
    asked = []

    def anywhere(here):
        asked.append(here)
        return True

    scaled = made[0].summed * np.float16(0.5) + made[1].summed * np.float16(0.5)
    for rank, expected in enumerate([55_000, 2.0]):
        part = slice(rank, rank + 1)
        result = made[rank].finished(total[part].copy(), lambda _, part=part: scaled[part].copy(), anywhere)
        np.testing.assert_allclose(result, [expected], rtol=1e-3)
    assert asked == [True, False]


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_smallest_numbers_are_exact_beside_one_that_overflows(dtype):
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    array = np.array([largest(dtype), smallest, 3 * smallest]).astype(dtype)
    result, sums = mean([array] * 4)
    np.testing.assert_array_equal(result, array)
    assert sums == 2
