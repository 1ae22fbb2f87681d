"""First values of rows: the same wherever and whenever they are made, and of the distribution that was asked for."""

import numpy as np
import pytest

from tfdist.parameter_server.options.initial_rows import InitialRows

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
KEYS = np.array([np.iinfo(np.int64).min, -7, -1, 0, 1, 2, 10**12, np.iinfo(np.int64).max])


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT64])
def test_a_row_depends_on_seed_and_key_only(distribution, dtype):
    initial = InitialRows(distribution, seed=3)
    rows = initial.rows(KEYS, 5, dtype)
    assert rows.dtype == dtype
    assert rows.shape == (8, 5)
    many = np.concatenate([np.arange(5000, 10000), KEYS[::-1]])  # in another order, and beyond those computed at once
    np.testing.assert_array_equal(initial.rows(many, 5, dtype)[:-9:-1], rows)
    np.testing.assert_array_equal(initial.rows(KEYS[2:3], 5, dtype), rows[2:3])
    assert len(np.unique(rows)) == rows.size, "no two elements are equal"
    assert not np.isin(InitialRows(distribution, seed=4).rows(KEYS, 5, dtype), rows).any()


def test_uniform_rows_never_change():
    """Workers and servers of different versions must agree."""
    rows = InitialRows(scale=1.0, seed=0).rows(np.array([0, -1]), 3, FLOAT64)
    expected = [[2065550767, -501176263, -1581685260], [-987062438, -1518897109, -2132438850]]
    np.testing.assert_array_equal(rows * 2**31, expected)


def test_uniform_rows_fill_their_range():
    rows = InitialRows("uniform", scale=0.5, mean=2.0).rows(np.arange(20000), 4, FLOAT64)
    assert 1.5 <= rows.min() < 1.501
    assert 2.499 < rows.max() <= 2.5
    np.testing.assert_allclose(rows.mean(axis=0), 2.0, atol=0.01)
    np.testing.assert_allclose(np.corrcoef(rows.T), np.eye(4), atol=0.03)


def test_normal_rows_have_mean_deviation_and_kurtosis():
    rows = (InitialRows("normal", scale=0.1, mean=-1.0, seed=-5).rows(np.arange(20000), 3, FLOAT32) + 1) / 0.1
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose(rows.std(axis=0), 1, atol=0.03)
    np.testing.assert_allclose((rows**4).mean(), 3, atol=0.15)  # the kurtosis of a normal distribution
    np.testing.assert_allclose(np.corrcoef(rows.T), np.eye(3), atol=0.03)


def test_zero_scale_gives_constant_rows():
    rows = InitialRows(scale=0.0, mean=0.25).rows(KEYS, 3, FLOAT32)
    np.testing.assert_array_equal(rows, np.full((8, 3), 0.25, np.float32))


def test_empty_keys_give_no_rows():
    assert InitialRows().rows(KEYS[:0], 3, FLOAT32).shape == (0, 3)


def test_invalid_distribution_or_scale_raises():
    with pytest.raises(ValueError, match='"uniform" or "normal"; got \'zeros\''):
        InitialRows("zeros")
    with pytest.raises(ValueError, match="scale must be at least 0"):
        InitialRows(scale=-1.0)
    with pytest.raises(ValueError, match="scale must be at least 0 and finite"):
        InitialRows(scale=float("nan"))
