import numpy as np
import pytest

from tfdist.parameter_server.protocol.layout import Layout

SHAPES = [(2, 3), (), (4,), (2,)]
DTYPES = [np.dtype(name) for name in ("float32", "float64", "float32", "float32")]


def arrays():
    return [
        np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def test_arrays_survive_concatenation_into_vectors():
    layout = Layout(SHAPES, DTYPES)
    vectors = layout.vectors(arrays())
    assert [(vector.dtype.name, vector.shape) for vector in vectors] == [("float32", (12,)), ("float64", (1,))]
    for array, other in zip(layout.arrays(vectors).values(), arrays(), strict=True):
        np.testing.assert_array_equal(array, other)
        assert array.shape == other.shape
        assert array.base is not None, "a view"


def test_excluded_arrays_take_no_space():
    layout = Layout(SHAPES, DTYPES, [False, False, True, True])
    vectors = layout.vectors([None, None, *arrays()[2:]])
    assert (layout.dtypes, layout.lengths) == ((np.dtype("float32"),), (6,))
    np.testing.assert_array_equal(vectors[0], [0, 1, 2, 3, 0, 1])
    assert list(layout.arrays(vectors)) == [2, 3]
    assert Layout(SHAPES, DTYPES, [False] * 4).vectors([None] * 4) == []


@pytest.mark.parametrize(
    "vectors", [[], [np.zeros(12, "f")], [np.zeros(12, "f"), np.zeros(1, "f")], [np.zeros(11, "f"), np.zeros(1)]]
)
def test_vectors_of_other_dtypes_or_lengths_raise(vectors):
    with pytest.raises(ValueError, match=r"expected \[\('float32', \(12,\)\), \('float64', \(1,\)\)\]"):
        Layout(SHAPES, DTYPES).check(vectors)
