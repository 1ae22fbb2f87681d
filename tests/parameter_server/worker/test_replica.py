"""A worker's copy against the arrays that it is of."""

import numpy as np
import pytest

from tfdist.parameter_server.protocol.gradients import Shapes
from tfdist.parameter_server.protocol.messages import WorkerValues
from tfdist.parameter_server.worker.replica import Replica

SHAPES = [(2,), (6, 2), (), (8,)]
KINDS = ("dense", "sparse", "dense", "sparse")


def shapes():
    return Shapes(SHAPES, [np.dtype(np.float32)] * 4)


def values(number):
    return [np.full(shape, number, np.float32) for shape in SHAPES]


def whole(number):
    return shapes().layout().vectors(values(number))


def rows(number, *indices):
    """An answer in which the rows of both tables are newer; those of the second are the last ones."""
    vectors = shapes().layout(KINDS).vectors(values(number))
    first, second = (np.array(row_ids, np.int64) for row_ids in (indices, [7 - index for index in indices]))
    wide, narrow = np.full((len(first), 2), number, np.float32), np.full(len(second), number, np.float32)
    return [*vectors, wide, first, narrow, second]


def replica():
    local_copy = Replica(shapes())
    local_copy.receive((5, 1), (), whole(1))
    local_copy.take()
    return local_copy


def assert_equal(arrays, expected):
    assert len(arrays) == len(expected)
    for array, other in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, other)


def test_received_variables_appear_after_take():
    local_copy = replica()
    assert local_copy.has == WorkerValues((5, 1))
    assert_equal(local_copy.values(), values(1))
    local_copy.receive((5, 2), (), whole(2))
    assert_equal(local_copy.values(), values(1))
    assert_equal(local_copy.take(), whole(2))
    assert_equal(local_copy.values(), values(2))


def test_received_rows_are_merged():
    local_copy = replica()
    local_copy.keep([3, 1])
    assert local_copy.has == WorkerValues((5, 1), (1, 3))
    local_copy.receive((5, 2), KINDS, rows(2, 0, 3))
    local_copy.receive((5, 3), KINDS, rows(3, 3, 4))
    vector, first, indices, second, others = local_copy.take([1, 3])
    assert vector.tolist() == [3, 3, 3]
    assert (first[:, 0].tolist(), indices.tolist()) == ([2, 3, 3], [0, 3, 4])
    assert (second.tolist(), others.tolist()) == ([3, 3, 2], [3, 4, 7])
    assert local_copy.has.edition == (5, 3)
    assert local_copy.values()[1][:, 1].tolist() == [2, 1, 1, 3, 3, 1]
    assert local_copy.take([1, 3])[2].size == 0, "nothing new"


def test_a_whole_answer_replaces_all_rows():
    """As after a dense gradient, an assignment, or when the server was started again."""
    local_copy = replica()
    local_copy.keep([1, 3])
    local_copy.receive((5, 2), KINDS, rows(2, 1))
    local_copy.receive((6, 0), (), whole(9))
    vector, first, indices = local_copy.take([1])
    assert_equal([vector, first, indices], [np.full(11, 9), np.full((6, 2), 9), np.arange(6)])
    assert local_copy.values()[3].tolist() == [9] * 8
    assert local_copy.has.edition == (6, 0)
    assert_equal(local_copy.take(), whole(9))


def test_rows_can_be_taken_as_whole_variables():
    local_copy = replica()
    local_copy.keep([1, 3])
    local_copy.receive((5, 2), KINDS, rows(2, 1))
    expected = values(2)
    expected[1][[0, 2, 3, 4, 5]] = 1
    expected[3][[0, 1, 2, 3, 4, 5, 7]] = 1
    assert_equal(local_copy.take(), shapes().layout().vectors(expected))
    assert_equal(local_copy.values(), expected)


def test_outdated_answer_is_ignored():
    local_copy = replica()
    local_copy.keep([1, 3])
    local_copy.receive((5, 3), KINDS, rows(3, 1, 2))
    local_copy.receive((5, 2), KINDS, rows(2, 1))
    assert local_copy.take([1, 3])[1].tolist() == [[3, 3], [3, 3]]
    assert local_copy.has.edition == (5, 3)


def test_whole_values_are_required_after_forget():
    local_copy = replica()
    local_copy.keep([1, 3])
    local_copy.forget()
    assert local_copy.has.edition is None
    local_copy.receive((5, 2), KINDS, rows(2, 1))  # to a push that was under way
    local_copy.take([1, 3])
    assert local_copy.has.edition is None
    local_copy.receive((5, 3), (), whole(3))
    assert local_copy.take([1, 3])[2].tolist() == list(range(6))
    assert local_copy.has.edition == (5, 3)


def test_unexpected_rows_raise():
    local_copy = replica()
    with pytest.raises(ValueError, match=r"rows of the variables \[1, 3\]; expected rows of \[\]"):
        local_copy.receive((5, 2), KINDS, rows(2, 0))
    local_copy.keep([1, 3])
    with pytest.raises(ValueError, match="rows from 0 to 6 of a variable with 6 rows"):
        local_copy.receive((5, 2), KINDS, rows(2, 0, 6))
