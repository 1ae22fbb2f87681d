import numpy as np
import pytest

from tfdist.compression.low_rank import LowRank, as_matrix, pack_factors

rng = np.random.default_rng(0)


class Factors(LowRank):
    """A low-rank method that only unpacks."""

    def pack(self, vector, state):
        raise NotImplementedError


def product(left, right, out=None, combine=None):
    out = np.full(left.shape[0] * right.shape[1], np.nan, left.dtype) if out is None else out
    Factors().unpack(pack_factors(left, right), out, combine)
    return out.reshape(left.shape[0], right.shape[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("rows", "rank", "columns"), [(1, 1, 1), (5, 2, 3), (1, 1, 9), (9, 1, 1), (300, 4, 200)])
def test_the_product_of_the_factors(rows, rank, columns, dtype):
    left, right = rng.standard_normal((rows, rank)).astype(dtype), rng.standard_normal((rank, columns)).astype(dtype)
    body = pack_factors(left, right)
    assert body.size == 4 + left.nbytes + right.nbytes
    expected = left.astype(np.float64) @ right.astype(np.float64)
    tolerance = 10 * np.finfo(dtype).eps * np.abs(expected).max()
    np.testing.assert_allclose(product(left, right), expected, atol=tolerance)
    out = np.ones(rows * columns, dtype)
    np.testing.assert_allclose(product(left, right, out, np.subtract), 1 - expected, atol=tolerance + 1e-6)


def test_factors_of_rank_0_give_zeros():
    """The factors of a matrix of zeros may have no columns."""
    np.testing.assert_array_equal(product(np.zeros((3, 0), np.float32), np.zeros((0, 4), np.float32)), 0)


def test_non_contiguous_factors_are_packed():
    left, right = rng.standard_normal((2, 6)).T, rng.standard_normal((4, 2)).T
    np.testing.assert_allclose(product(left, right), left @ right)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_overflow_in_partial_products_does_not_affect_the_sum(dtype):
    """Their sum is not: 2 a b - a b, where 2 a b is not representable."""
    most = float(np.finfo(dtype).max)
    half = most**0.5
    left, right = np.array([[2 * half, -half]], dtype), np.array([[half], [half]], dtype)
    for combine, base, expected in ((None, None, 1.0), (np.add, -most / 2, 0.5), (np.subtract, most / 2, -0.5)):
        out = None if base is None else np.array([base], dtype)
        result = product(left, right, out, combine)
        np.testing.assert_allclose(result / most, [[expected]], rtol=1e-5)


def test_product_beyond_the_range_saturates():
    most = np.finfo(np.float32).max
    left, right = np.array([[1e30], [-1e30]], np.float32), np.array([[1e30, 1.0]], np.float32)
    with np.errstate(over="ignore"):  # as the engine does
        result = product(left, right)
    np.testing.assert_allclose(result, [[most, 1e30], [-most, -1e30]], rtol=1e-6)


@pytest.mark.parametrize(
    ("elements", "shape", "expected"),
    [
        (24, (4, 6), (4, 6)),
        (24, (2, 3, 4), (6, 4)),  # the last axis by all others, as of a convolution
        (24, (24,), (6, 4)),
        (24, None, (6, 4)),
        (25, None, (5, 5)),
        (7, None, (7, 1)),
        (1, (), (1, 1)),
    ],
)
def test_vectors_are_viewed_as_matrices(elements, shape, expected):
    vector = np.arange(float(elements))
    matrix = as_matrix(vector, shape)
    assert matrix.shape == expected
    assert np.shares_memory(matrix, vector)
    np.testing.assert_array_equal(matrix.reshape(-1), vector)
