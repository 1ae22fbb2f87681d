import types

import numpy as np
import pytest

from tfdist.compression import TopK
from tfdist.compression.compressor import Compressor
from tfdist.local_sgd.exchanges import Attendance, Exchanges

ARRAYS = [np.arange(6.0).reshape(2, 3), np.array(2.0, np.float32), np.ones(4)]


def test_attendance_is_added_up(ranks):
    def work(group):
        exchanges = Exchanges(group, "one", ["a"])
        attendance = exchanges.attend(Attendance(10 * group.rank, 1, int(group.rank == 2), 0, 2))
        return attendance, exchanges.furthest(group.rank + 5)

    assert ranks(3)(work) == [(Attendance(30, 3, 1, 0, 6), 7)] * 3


def test_sums_are_weighted(ranks):
    def work(group):
        exchanges = Exchanges(group, "one", ["a", "b", "c"])
        values = [array + array.dtype.type(group.rank) for array in ARRAYS]
        if group.rank == 2:
            values[0][:] = np.nan
        kept = [array.copy() for array in values]
        sums = exchanges.finish(exchanges.begin([0, 1, 2], values, (0.25, 0.75, 0.0)[group.rank], overlaps=False))
        for array, before in zip(values, kept, strict=True):
            np.testing.assert_array_equal(array, before)
        return sums

    for results in ranks(3)(work):
        for result, expected in zip(results, ARRAYS, strict=True):
            assert (result.dtype, result.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(result, expected + 0.75)


def test_two_exchanges_can_be_under_way_at_once(ranks):
    def work(group):
        exchanges = Exchanges(group, "one", ["a", "b"])
        first = exchanges.begin([0], [np.ones(3)], 0.5, overlaps=True)
        second = exchanges.begin([1], [np.full(3, 2.0)], 0.5, overlaps=True)
        return exchanges.finish(second)[0].tolist(), exchanges.finish(first)[0].tolist()

    assert ranks(2)(work) == [([2.0] * 3, [1.0] * 3)] * 2


def test_compression_residual_is_sent_later(ranks):
    def work(group):
        compressor = Compressor(TopK(0.1), group.rank, group.size)
        compressor.register({"key of a": ("a", (40, 40)), "key of b": ("b", (3,))})
        exchanges = Exchanges(group, "one", ["a", "b"], compressor, ["key of a", "key of b"])
        values = np.random.default_rng(group.rank).normal(size=(40, 40))
        total = np.zeros([40, 40])
        for _ in range(60):
            average, plain = exchanges.finish(exchanges.begin([0, 1], [values, np.ones(3)], 0.5, overlaps=False))
            total += average
            np.testing.assert_array_equal(plain, 1)
        return average, total / 60, values

    results = ranks(2)(work)
    assert np.count_nonzero(results[0][0]) <= 2 * 160
    np.testing.assert_array_equal(results[0][0], results[1][0])
    mean = (results[0][2] + results[1][2]) / 2
    assert np.abs(results[0][1] - mean).max() < 0.3


def test_one_process_has_its_own_values_as_sums():
    alone = Exchanges(types.SimpleNamespace(size=1), "one", "abc")
    attendance = Attendance(3, 1, 0, 1)
    assert alone.attend(attendance) == attendance
    assert alone.furthest(4) == 4
    sums = alone.finish(alone.begin([0, 1, 2], ARRAYS, 0.5, overlaps=False))
    for array, expected in zip(sums, ARRAYS, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.shape == expected.shape


def test_different_variables_are_an_error(ranks):
    from tfdist.errors import MismatchError

    def work(group):
        exchanges = Exchanges(group, "one", ["a"])
        exchanges.finish(exchanges.begin([0], [np.ones(3 + group.rank)], 0.5, overlaps=False))

    with pytest.raises(MismatchError, match=r"float64 \(3,\)"):
        ranks(2)(work)
