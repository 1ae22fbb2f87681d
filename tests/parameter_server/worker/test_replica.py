"""A worker's copy against the arrays that it is of."""

import numpy as np
import pytest

from tfdist.parameter_server.protocol.gradients import Shapes
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
    first, second = (np.array(one, np.int64) for one in (indices, [7 - index for index in indices]))
    wide, narrow = np.full((len(first), 2), number, np.float32), np.full(len(second), number, np.float32)
    return [*vectors, wide, first, narrow, second]


def replica():
    one = Replica(shapes())
    one.receive((5, 1), (), whole(1))
    one.take()
    return one


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_received_variables_appear_after_take():
    one = replica()
    assert one.kept == ()
    assert_equal(one.values(), values(1))
    one.receive((5, 2), (), whole(2))
    assert_equal(one.values(), values(1))
    assert_equal(one.take(), whole(2))
    assert_equal(one.values(), values(2))


def test_received_rows_are_merged():
    one = replica()
    one.keep([3, 1])
    assert (one.edition, one.kept) == ((5, 1), (1, 3))
    one.receive((5, 2), KINDS, rows(2, 0, 3))
    one.receive((5, 3), KINDS, rows(3, 3, 4))
    vector, first, indices, second, others = one.take([1, 3])
    assert vector.tolist() == [3, 3, 3]
    assert (first[:, 0].tolist(), indices.tolist()) == ([2, 3, 3], [0, 3, 4])
    assert (second.tolist(), others.tolist()) == ([3, 3, 2], [3, 4, 7])
    assert one.edition == (5, 3)
    assert one.values()[1][:, 1].tolist() == [2, 1, 1, 3, 3, 1]
    assert one.take([1, 3])[2].size == 0, "nothing new"


def test_a_whole_answer_replaces_all_rows():
    """As after a dense gradient, an assignment, or when the server was started again."""
    one = replica()
    one.keep([1, 3])
    one.receive((5, 2), KINDS, rows(2, 1))
    one.receive((6, 0), (), whole(9))
    vector, first, indices = one.take([1])
    assert_equal([vector, first, indices], [np.full(11, 9), np.full((6, 2), 9), np.arange(6)])
    assert one.values()[3].tolist() == [9] * 8
    assert one.edition == (6, 0)
    assert_equal(one.take(), whole(9))


def test_rows_can_be_taken_as_whole_variables():
    one = replica()
    one.keep([1, 3])
    one.receive((5, 2), KINDS, rows(2, 1))
    expected = values(2)
    expected[1][[0, 2, 3, 4, 5]] = 1
    expected[3][[0, 1, 2, 3, 4, 5, 7]] = 1
    assert_equal(one.take(), shapes().layout().vectors(expected))
    assert_equal(one.values(), expected)


def test_outdated_answer_is_ignored():
    one = replica()
    one.keep([1, 3])
    one.receive((5, 3), KINDS, rows(3, 1, 2))
    one.receive((5, 2), KINDS, rows(2, 1))
    assert one.take([1, 3])[1].tolist() == [[3, 3], [3, 3]]
    assert one.edition == (5, 3)


def test_whole_values_are_required_after_forget():
    one = replica()
    one.keep([1, 3])
    one.forget()
    assert one.edition is None
    one.receive((5, 2), KINDS, rows(2, 1))  # to a push that was under way
    one.take([1, 3])
    assert one.edition is None
    one.receive((5, 3), (), whole(3))
    assert one.take([1, 3])[2].tolist() == list(range(6))
    assert one.edition == (5, 3)


def test_unexpected_rows_raise():
    one = replica()
    with pytest.raises(ValueError, match=r"rows of the variables \[1, 3\]; expected rows of \[\]"):
        one.receive((5, 2), KINDS, rows(2, 0))
    one.keep([1, 3])
    with pytest.raises(ValueError, match="rows from 0 to 6 of a variable with 6 rows"):
        one.receive((5, 2), KINDS, rows(2, 0, 6))
