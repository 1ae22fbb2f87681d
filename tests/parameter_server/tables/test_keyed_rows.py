"""Columns stay with their keys."""

import numpy as np

from tfdist.parameter_server.tables.keyed_rows import KeyedRows


def rows_of(keys):
    rows = KeyedRows({"values": ((2,), np.float32), "uses": ((), np.int64)})
    rows.add(keys, {"values": np.stack([keys, -keys], axis=1), "uses": 7})
    return rows


def check(rows, expected):
    """Each key has its values."""
    assert sorted(rows.keys.tolist()) == sorted(expected)
    assert len(rows) == len(rows["values"]) == len(expected)
    slots = rows.find(np.array(expected, np.int64))
    np.testing.assert_array_equal(rows["values"][slots], np.array([[key, -key] for key in expected]).reshape(-1, 2))
    assert rows["uses"].tolist() == [7] * len(expected)


def test_added_rows_are_found():
    rows = rows_of(np.array([5, 3, 9]))
    assert rows.columns == ["values", "uses"]
    check(rows, [3, 5, 9])
    assert rows.find(np.array([4])).tolist() == [-1]


def test_columns_are_written_in_place():
    rows = rows_of(np.array([5, 3, 9]))
    rows["uses"][rows.find(np.array([3, 9]))] += 1
    assert rows["uses"].tolist() == [7, 8, 8]


def test_rows_grow_and_shrink():
    rows = rows_of(np.arange(10))
    for begin in (10, 1000, 1001, 5000):
        keys = np.setdiff1d(np.arange(begin, 2 * begin), rows.keys)
        rows.add(keys, {"values": np.stack([keys, -keys], axis=1), "uses": 7})
    check(rows, [*range(20), *range(1000, 2002), *range(5000, 10000)])
    rows.remove(rows.find(np.setdiff1d(rows.keys, [3, 1500, 9999])))
    check(rows, [3, 1500, 9999])
    rows.remove(np.arange(3))
    check(rows, [])
