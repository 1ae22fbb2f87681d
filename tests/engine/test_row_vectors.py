import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import eagerly, in_a_graph
from tfdist.engine.row_vectors import RowVectors, arrays_of, parts_of


def slices_of(*forms):
    """Rows of the given counts, shapes and dtypes, which are all different."""
    made, begin = [], 0
    for count, shape, dtype, index_dtype in forms:
        values = tf.reshape(tf.range(begin, begin + count * int(np.prod(shape))), [count, *shape])
        made.append(tf.IndexedSlices(tf.cast(values, dtype), tf.range(begin, begin + count, dtype=index_dtype)))
        begin += 100
    return made


MIXED = [
    (2, (3,), tf.float32, tf.int64),
    (0, (2, 2), tf.float32, tf.int64),
    (3, (2,), tf.float64, tf.int32),
    (4, (), tf.float32, tf.int64),
    (2, (0,), tf.float64, tf.int64),
]


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
@pytest.mark.parametrize("forms", [MIXED, MIXED[:1], MIXED[4:]], ids=["several", "one", "rows without elements"])
def test_vectors_are_cut_into_what_they_were_made_of(call, forms):
    def there_and_back():
        vectors = RowVectors(slices_of(*forms))
        return vectors.cut(vectors.vectors, vectors.counts)

    results = call(there_and_back)
    given = slices_of(*forms)
    for result, tensor in zip(results, [*(s.values for s in given), *(s.indices for s in given)], strict=True):
        assert result.dtype == tensor.dtype
        np.testing.assert_array_equal(result, tensor)


def test_tensors_of_a_dtype_are_one_vector():
    vectors = RowVectors(slices_of(*MIXED))
    assert vectors.kinds == [[0, 1, 3], [2, 4], [5, 6, 8, 9], [7]]
    assert [vector.dtype for vector in vectors.vectors] == [tf.float32, tf.float64, tf.int64, tf.int32]


def test_indices_and_rows_of_one_dtype_are_apart():
    """Rows have a weight."""
    vectors = RowVectors([tf.IndexedSlices(tf.ones([2, 2], tf.int64), tf.zeros([2], tf.int64))])
    assert vectors.kinds == [[0], [1]]


def test_vectors_of_other_numbers_of_rows():
    """A step that gathers returns more rows than it was given."""
    vectors = RowVectors(slices_of(*MIXED[:3]))
    counts = tf.constant([1, 2, 0], tf.int64)
    given = [tf.range(3.0 + 8.0), tf.zeros([0], tf.float64), tf.range(3, dtype=tf.int64), tf.zeros([0], tf.int32)]
    first, second, third, *indices = vectors.cut(given, counts)
    np.testing.assert_array_equal(first, [[0, 1, 2]])
    np.testing.assert_array_equal(second, np.arange(3, 11).reshape(2, 2, 2))
    assert third.shape == (0, 2)
    assert [index.numpy().tolist() for index in indices] == [[0], [1, 2], []]


def test_rows_whose_shape_is_known_at_run_time_only():
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def there_and_back(values):
        vectors = RowVectors([tf.IndexedSlices(values, tf.range(tf.shape(values)[0]))] * 2)
        return vectors.cut(vectors.vectors, vectors.counts), vectors.widths

    (first, second, *_), widths = there_and_back(tf.ones([2, 5]))
    assert first.shape == second.shape == (2, 5)
    assert widths.numpy().tolist() == [5, 5]


def test_arrays_are_views_of_vectors_and_go_back():
    vectors = RowVectors(slices_of(*MIXED))
    given = [vector.numpy() for vector in vectors.vectors]
    arrays = arrays_of(vectors.kinds, given, *(each.numpy().tolist() for each in (vectors.counts, vectors.widths)))
    assert [array.shape for array in arrays[:5]] == [(2, 3), (0, 4), (3, 2), (4, 1), (2, 0)]
    assert all(array.base is not None for array in arrays)
    for parts, vector in zip(parts_of(vectors.kinds, [[array] for array in arrays]), given, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), vector)
