import numpy as np
import pytest

from tfdist.parameter_server.protocol.gradients import PushedGradients, Shapes, weighted_sum

FLOAT = np.dtype(np.float32)
SHAPES = Shapes([(4, 3), (3,)], [FLOAT, FLOAT])
ROWS, INDICES = np.ones((2, 3), np.float32), np.array([0, 3])


def dense(kernel, bias):
    return PushedGradients(("dense", "dense"), [np.repeat(np.float32([kernel, bias]), [12, 3])])


def sparse(bias):
    return PushedGradients(("sparse", "dense"), [np.full(3, bias, np.float32)], {0: (ROWS, INDICES)})


def test_arrays_are_received_as_they_were_sent():
    for gradients in (
        dense(1, 2),
        sparse(3),
        PushedGradients(("none", "sparse"), [], {1: (ROWS[:, 0], np.array([2, 2]))}),
    ):
        again = PushedGradients.received(gradients.kinds, gradients.arrays(), SHAPES)
        assert again.kinds == gradients.kinds
        for mine, other in zip(again.arrays(), gradients.arrays(), strict=True):
            np.testing.assert_array_equal(mine, other)
    assert PushedGradients.received((), dense(1, 2).arrays(), SHAPES).kinds == ("dense", "dense")


@pytest.mark.parametrize(
    ("kinds", "arrays", "words"),
    [
        (("dense",), [np.ones(15, FLOAT)], "1 gradients for 2 variables"),
        (("dense", "dense"), [], "got 0 arrays of gradients; expected 1"),
        (("dense", "none"), [np.ones(12, FLOAT), np.ones(3, FLOAT)], "got 2 arrays of gradients; expected 1"),
        (("dense", "none"), [np.ones(15, FLOAT)], r"expected \[\('float32', \(12,\)\)\]"),
        (("dense", "dense"), [np.ones(15)], r"vectors \[\('float64', \(15,\)\)\]"),
        (("sparse", "none"), [ROWS, np.array([0, 4])], "rows from 0 to 4 of a variable with 4 rows"),
        (("sparse", "none"), [ROWS, np.array([-1, 0])], "rows from -1 to 0"),
        (("sparse", "none"), [ROWS[:1], INDICES], r"rows of shape \(1, 3\) with indices of shape \(2,\)"),
        (("sparse", "none"), [ROWS, np.ones(2)], r"rows of shape \(2, 3\)"),
        (("sparse", "none"), [ROWS[:, :2], INDICES], r"rows of shape \(2, 2\)"),
    ],
)
def test_gradients_that_do_not_fit_the_variables_raise(kinds, arrays, words):
    with pytest.raises(ValueError, match=words):
        PushedGradients.received(kinds, arrays, SHAPES)


def as_arrays(gradients):
    arrays = SHAPES.layout(gradients.kinds).arrays(gradients.vectors)
    return arrays.get(0), arrays.get(1)


def test_weighted_sums_of_dense_gradients():
    total = weighted_sum([dense(1, 2), dense(3, 4)], [0.5, 2.0], SHAPES)
    kernel, bias = as_arrays(total)
    assert (kernel == 6.5).all()
    assert (bias == 9).all()
    gradients = dense(1, 2)
    assert weighted_sum([gradients], [1.0], SHAPES) is gradients
    assert (as_arrays(weighted_sum([gradients], [0.5], SHAPES))[1] == 1).all()


def test_weighted_sum_of_sparse_gradients_stays_sparse():
    total = weighted_sum([sparse(1), sparse(2)], [1.0, 0.5], SHAPES)
    rows, indices = total.sparse[0]
    np.testing.assert_array_equal(rows[:, 0], [1, 1, 0.5, 0.5])
    np.testing.assert_array_equal(indices, [0, 3, 0, 3])
    assert (as_arrays(total)[1] == 2).all()


def test_weighted_sum_of_sparse_and_dense_is_dense():
    """Rows beside a dense one become dense; one that is absent adds nothing."""
    none = PushedGradients(("none", "dense"), [np.ones(3, np.float32)])
    total = weighted_sum([sparse(1), dense(2, 2), none], [1.0, 0.5, 1.0], SHAPES)
    kernel, bias = as_arrays(total)
    np.testing.assert_array_equal(kernel[:, 0], [2, 1, 1, 2])
    assert (bias == 3).all()
    total = weighted_sum([sparse(1), none], [1.0, 1.0], SHAPES)
    assert total.kinds == ("sparse", "dense")
    only = PushedGradients(("none", "none"), [])
    assert weighted_sum([only, only], [1.0, 1.0], SHAPES).kinds == ("none", "none")


def test_weighted_sum_does_not_write_to_its_inputs():
    first, second = dense(1, 2), dense(3, 4)
    for vector in (*first.vectors, *second.vectors):
        vector.flags.writeable = False
    weighted_sum([first, second], [1.0, 1.0], SHAPES)
    assert (first.vectors[0][:12] == 1).all()
