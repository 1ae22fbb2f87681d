import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import eagerly, in_a_graph
from tfdist.engine.row_vectors import Layout, Parts, RowVectors

MIXED = [
    (2, (3,), tf.float32, tf.int64),
    (0, (2, 2), tf.float32, tf.int64),
    (3, (2,), tf.float64, tf.int32),
    (4, (), tf.float32, tf.int64),
    (2, (0,), tf.float64, tf.int64),
]


def slices_of(*forms):
    """Rows of the given counts, shapes and dtypes, which are all different."""
    made, begin = [], 0
    for count, shape, dtype, index_dtype in forms:
        values = tf.reshape(tf.range(begin, begin + count * int(np.prod(shape))), [count, *shape])
        made.append(tf.IndexedSlices(tf.cast(values, dtype), tf.range(begin, begin + count, dtype=index_dtype)))
        begin += 100
    return made


def take(nbytes):
    return np.full(nbytes, 0xFF, np.uint8)


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
@pytest.mark.parametrize("forms", [MIXED, MIXED[:1], MIXED[4:]], ids=["several", "one", "rows without elements"])
def test_vectors_are_cut_into_what_they_were_made_of(call, forms):
    def there_and_back():
        vectors = RowVectors(slices_of(*forms))
        return [(each.values, each.indices) for each in vectors.cut(vectors.vectors)]

    for (values, indices), given in zip(call(there_and_back), slices_of(*forms), strict=True):
        for result, tensor in ((values, given.values), (indices, given.indices)):
            assert result.dtype == tensor.dtype
            np.testing.assert_array_equal(result, tensor)


def test_tensors_of_a_dtype_are_one_vector():
    vectors = RowVectors(slices_of(*MIXED))
    assert vectors.layout == Layout(rows=[[0, 1, 3], [2, 4]], indices=[[0, 1, 3, 4], [2]])
    assert [vector.dtype for vector in vectors.vectors] == [tf.float32, tf.float64, tf.int64, tf.int32]
    assert vectors.vectors[-1].numpy().tolist() == [3, 200, 201, 202], "the number of rows, and their indices"
    assert vectors.widths.numpy().tolist() == [3, 4, 2, 1, 0]


def test_indices_and_rows_of_one_dtype_are_apart():
    """Rows have a weight."""
    vectors = RowVectors([tf.IndexedSlices(tf.ones([2, 2], tf.int64), tf.zeros([2], tf.int64))])
    assert vectors.layout == Layout(rows=[[0]], indices=[[0]])
    assert len(vectors.vectors) == 2


def test_rows_whose_shape_is_known_at_run_time_only():
    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def there_and_back(values):
        vectors = RowVectors([tf.IndexedSlices(values, tf.range(tf.shape(values)[0]))] * 2)
        return [each.values for each in vectors.cut(vectors.vectors)], vectors.widths

    (first, second), widths = there_and_back(tf.ones([2, 5]))
    assert first.shape == second.shape == (2, 5)
    assert widths.numpy().tolist() == [5, 5]


def packed(forms):
    """The vectors of one process, as arrays, their layout and the widths."""
    vectors = RowVectors(slices_of(*forms))
    return [vector.numpy() for vector in vectors.vectors], vectors.layout, vectors.widths.numpy().tolist()


def test_vectors_of_one_process_are_unpacked_and_packed():
    given, layout, widths = packed(MIXED)
    parts = layout.unpack(given, [[len(vector)] for vector in given], widths)
    assert [each.count for each in parts] == [2, 0, 3, 4, 2]
    for each, slices in zip(parts, slices_of(*MIXED), strict=True):
        np.testing.assert_array_equal(np.concatenate(each.rows), slices.values.numpy().reshape(-1))
        np.testing.assert_array_equal(np.concatenate(each.indices), slices.indices)
    for vector, again in zip(given, layout.pack(parts, [each.dtype for each in given], take), strict=True):
        assert again.dtype == vector.dtype
        np.testing.assert_array_equal(again, vector)


@pytest.mark.parametrize("variables", [1, 2])
def test_vectors_of_several_processes_become_those_of_all(variables):
    """Each with another number of rows; the second has none, and the third sends nothing."""
    given = [packed([(count, (2,), tf.float32, tf.int64)] * variables) for count in (2, 0, 1)]
    processes = [vectors for vectors, _, _ in given]
    processes.insert(2, [vector[:0] for vector in processes[0]])
    every = [np.concatenate(each) for each in zip(*processes, strict=True)]
    sizes = [[len(vector) for vector in each] for each in zip(*processes, strict=True)]
    _, layout, widths = given[0]
    parts = layout.unpack(every, sizes, widths)
    rows, indices = layout.pack(parts, [each.dtype for each in every], take)
    assert indices.tolist() == [[3, 0, 1, 0], [3, 3, 0, 1, 0, 100, 101, 100]][variables - 1]
    first = [0, 1, 2, 3, 0, 1]
    assert rows.tolist() == [first, [*first, *(100 + element for element in first)]][variables - 1]
    assert (rows is every[0]) == (variables == 1), "rows of one variable are not copied"


def test_variables_without_rows():
    _, layout, _ = packed(MIXED)
    dtypes = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.int32)]
    vectors = layout.pack([Parts() for _ in MIXED], dtypes, take)
    assert [vector.tolist() for vector in vectors] == [[], [], [0, 0, 0, 0], [0]]
    assert [vector.dtype for vector in vectors] == dtypes
