import ml_dtypes
import numpy as np
import pytest

from tfdist.engine import packed_rows

ROWS = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((0, 2), ml_dtypes.bfloat16), np.full((3, 1), 1 + 2j)]
INDICES = [np.array([4, 4], np.int32), np.zeros(0, np.int64), np.array([0, 2, 1], np.int64)]


def take(nbytes):
    return np.full(nbytes, 0xFF, np.uint8)


@pytest.mark.parametrize("factor", [None, 0.5])
def test_a_message_has_the_rows_and_indices_of_each_variable(factor):
    message = packed_rows.pack(ROWS, INDICES, factor, take)
    arrays = packed_rows.unpack(message, ROWS, INDICES)
    for array, given in zip(arrays, [*(rows * (factor or 1) for rows in ROWS), *INDICES], strict=True):
        assert array.shape == given.shape
        np.testing.assert_array_equal(array, given)
    assert [array.dtype for array in arrays] == [array.dtype for array in [*ROWS, *INDICES]]


def test_a_message_tells_its_own_numbers_of_rows():
    """Another process may have others, also none."""
    none = [rows[:0] for rows in ROWS], [indices[:0] for indices in INDICES]
    message = packed_rows.pack(ROWS, INDICES, None, take)
    np.testing.assert_array_equal(packed_rows.unpack(message, *none)[0], ROWS[0])
    assert [len(array) for array in packed_rows.unpack(packed_rows.pack(*none, 0.5, take), ROWS, INDICES)] == [0] * 6


def test_what_a_weight_of_zero_makes_of_rows_that_are_not_finite():
    rows = [np.full((1, 2), np.nan, np.float32), np.full((1, 1), np.inf, np.float32)]
    message = packed_rows.pack(rows, [np.array([1]), np.array([2])], 0.0, take)
    assert not any(array.any() for array in packed_rows.unpack(message, rows, [np.array([1])] * 2)[:2])
