import ml_dtypes
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tfdist.collectives import adasum

SIZES = [5, 0, 40_000]


def pair(left, right):
    """By the formula, in float64."""
    product, first, second = left @ right, left @ left, right @ right
    return (1 - product / (2 * first) if first else 1) * left + (1 - product / (2 * second) if second else 1) * right


def expected(vectors):
    """By definition: the first ranks in pairs until there is a power of two, then pairs of pairs."""
    power = 1 << (len(vectors).bit_length() - 1)
    extra = len(vectors) - power
    level = [pair(vectors[2 * place], vectors[2 * place + 1]) for place in range(extra)] + vectors[2 * extra :]
    while len(level) > 1:
        level = [pair(level[place], level[place + 1]) for place in range(0, len(level), 2)]
    return level[0]


def results(vectors, sizes=None, in_place=False, **world):
    given = [vector.copy() for vector in vectors]
    outputs = given if in_place else [np.full_like(vector, np.nan) for vector in vectors]

    def plan(rank):
        return adasum.all_reduce(outputs[rank], sizes or [outputs[rank].size], None if in_place else given[rank])

    simulate(len(vectors), plan, **world)
    if not in_place:
        np.testing.assert_array_equal(given, vectors)
    return outputs


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("in_place", [True, False])
def test_each_tensor_is_combined_by_itself(size, in_place):
    generator = np.random.default_rng(size)
    vectors = [generator.normal(size=sum(SIZES)) for _ in range(size)]
    wanted = np.concatenate(
        [expected(list(parts)) for parts in zip(*(np.split(v, [5, 5]) for v in vectors), strict=True)]
    )
    for result in results(vectors, SIZES, in_place, segment_bytes=1000):
        np.testing.assert_allclose(result, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_have_the_same_bits(size, dtype):
    generator = np.random.default_rng(0)
    vectors = [generator.normal(size=70_000).astype(dtype) for _ in range(size)]
    first, *others = results(vectors)
    wanted = expected([vector.astype(np.float64) for vector in vectors])
    np.testing.assert_allclose(first.astype(np.float64), wanted, rtol=0, atol=4 * float(ml_dtypes.finfo(dtype).eps) * 4)
    for other in others:
        assert other.tobytes() == first.tobytes()


def test_equal_gradients_are_averaged_and_orthogonal_ones_added():
    same = np.array([3.0, -4.0])
    for result in results([same] * 4):
        np.testing.assert_allclose(result, same)
    for result in results([np.array([1.0, 0.0, 0.0]), np.array([0.0, 2.0, 0.0])]):
        np.testing.assert_allclose(result, [1, 2, 0])
    for result in results([np.zeros(2), same, np.zeros(2)]):
        np.testing.assert_allclose(result, same)


def test_infinity_gives_a_non_finite_result():
    for result in results([np.array([1.0, np.inf]), np.array([1.0, 2.0])]):
        assert not np.isfinite(result).all()


def test_integers_and_wrong_sizes_raise():
    with pytest.raises(ValueError, match="takes floating-point numbers; got int32"):
        adasum.all_reduce(np.zeros(3, np.int32), [3])
    with pytest.raises(ValueError, match=r"must add up to 3; got \[2\]"):
        adasum.all_reduce(np.zeros(3), [2])


@pytest.mark.parametrize(
    ("value", "dtype"), [(1e30, np.float32), (1e-30, np.float32), (1000.0, np.float16), (1e-5, np.float16)]
)
def test_squares_beyond_dtype_range_do_not_distort_the_result(value, dtype):
    vector = np.full(3, value, dtype)
    for result in results([vector] * 2):
        np.testing.assert_allclose(result, vector, rtol=1e-3)
