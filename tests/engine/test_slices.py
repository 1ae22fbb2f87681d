import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS, eagerly, in_a_graph
from tfdist.engine.slices import Slices
from tfdist.errors import MismatchError
from tfdist.runtime import world

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32]


def summed(group, call, values, indices, shape=None, **arguments):
    """As arrays: the values, the indices, and the dense shape."""

    def all_reduce(*components):
        slices = Slices(group).all_reduce([tf.IndexedSlices(*components)], **arguments)[0]
        assert values.shape[1:] == tuple(slices.values.shape[1:])
        return slices

    components = [tf.constant(values), tf.constant(indices), *([] if shape is None else [tf.constant(shape)])]
    slices = call(all_reduce, *components)
    return slices.values.numpy(), slices.indices.numpy(), None if shape is None else slices.dense_shape.numpy()


def rows_of(rank, dtype=np.float32):
    """One row more on each rank; the index 7 occurs on all, and twice on all but rank 0."""
    return np.full((rank + 1, 3), rank + 1).astype(dtype), np.full(rank + 1, 7)


@BOTH_WAYS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [None, [100, 3]])
def test_every_occurrence_of_a_row_is_kept_in_the_order_of_ranks(ranks, size, call, dtype, shape):
    for values, indices, dense_shape in ranks(size)(
        lambda group: summed(group, call, *rows_of(group.rank, dtype), shape)
    ):
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, np.concatenate([rows_of(rank, dtype)[0] for rank in range(size)]))
        np.testing.assert_array_equal(indices, np.full(len(values), 7))
        assert shape == (None if dense_shape is None else dense_shape.tolist())


@BOTH_WAYS
@pytest.mark.parametrize("rows", [4, 10_000])
def test_rows_are_summed_where_that_sends_fewer_bytes(ranks, size, call, rows):
    """Not of a large variable, of which few rows change."""

    def work(group):
        values, indices = np.full((5, 3), group.rank + 1.0), np.array([0, 0, 0, 0, 3])
        return summed(group, call, values, indices, [rows, 3], keep_rows=False)

    for values, indices, _ in ranks(size)(work):
        assert len(values) == (4 if rows == 4 else 5 * size)
        dense = np.zeros((rows, 3))
        np.add.at(dense, indices, values)
        total = sum(range(1, size + 1))
        np.testing.assert_array_equal(dense[[0, 3]], [[4 * total] * 3, [total] * 3])
        assert dense.sum() == 3 * 5 * total


@BOTH_WAYS
def test_rows_of_several_variables_are_summed_in_one_call_of_the_host(ranks, size, call):
    """Each in its own way: variables of other dtypes, few and many rows, with a dense shape and without."""

    def work(group):
        values = [tf.ones([2, 3]), tf.ones([2, 1], tf.float64), tf.ones([4, 2])]
        indices = [
            tf.constant([group.rank, 3]),
            tf.constant([group.rank, 3], tf.int64),
            tf.constant([group.rank, 3, 3, 3]),
        ]
        shapes = [tf.constant([1000, 3]), None, tf.constant([4, 2])]

        def all_reduce():
            slices = [tf.IndexedSlices(*each) for each in zip(values, indices, shapes, strict=True)]
            return Slices(group).all_reduce(slices, keep_rows=False, weight=tf.constant(0.5, tf.float64))

        calls = group.engine.statistics.begun
        return call(all_reduce), group.engine.statistics.begun - calls

    for (few, unknown, many), collectives in ranks(size)(work):
        gathered = [index for rank in range(size) for index in (rank, 3)]
        for slices, width in ((few, 3), (unknown, 1)):
            np.testing.assert_array_equal(slices.indices, gathered)
            np.testing.assert_array_equal(slices.values, np.full([2 * size, width], 0.5))
        assert few.dense_shape.numpy().tolist() == [1000, 3]
        assert unknown.indices.dtype == tf.int64
        assert unknown.values.dtype == tf.float64
        np.testing.assert_array_equal(many.indices, range(4))
        occurrences = np.bincount([*range(size), *[3] * 3 * size])
        np.testing.assert_array_equal(many.values[:, 0], occurrences / 2)
        assert collectives == 6, (
            "the numbers of rows, a vector of each of two dtypes of rows and of indices, a dense sum"
        )


def test_rows_of_other_widths_raise_mismatch_error(ranks):
    """As vectors they could be summed."""
    both = ranks(2)
    with pytest.raises(tf.errors.OpError, match=r"MismatchError: .*rows of 2(, 3)? float32"):
        both(lambda group: summed(group, in_a_graph, np.zeros((3, 2 + group.rank), np.float32), np.arange(3)))
    assert isinstance(both.groups[0].failure or both.groups[1].failure, MismatchError)


def test_without_slices_nothing_is_sent(ranks):
    def work(group):
        return Slices(group).all_reduce([]), group.engine.statistics.begun

    assert ranks(2)(work) == [([], 0)] * 2


def test_without_a_dense_shape_rows_cannot_be_summed(ranks):
    for values, _, _ in ranks(2)(lambda group: summed(group, eagerly, *rows_of(1), keep_rows=False)):
        assert len(values) == 4


@BOTH_WAYS
@pytest.mark.parametrize("shape", [None, [8, 3]])
def test_rank_without_contribution_adds_no_rows(ranks, size, call, shape):
    """By a flag or by a weight, whatever the rows are."""

    def work(group, arguments):
        values, indices = rows_of(0)
        values = np.full_like(values, np.nan) if group.rank == 0 else values
        return summed(group, call, values, indices, shape, keep_rows=False, **arguments(group.rank != 0))

    everyone = ranks(size)
    for arguments in (
        lambda has_samples: {"contributes": tf.constant(has_samples)},
        lambda has_samples: {"weight": tf.constant(float(has_samples), tf.float64)},
    ):
        for values, indices, _ in everyone(work, arguments):
            np.testing.assert_array_equal(values, np.ones((size - 1, 3)))
            np.testing.assert_array_equal(indices, np.full(size - 1, 7))


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rows_are_weighted(ranks, call, dtype):
    weights = [0.25, 3.0]

    def work(group):
        given, indices = np.ones((2, 3), dtype), np.array([1, 1])
        weight = tf.constant(weights[group.rank], tf.float64)
        result = summed(group, call, given, indices, weight=weight)
        np.testing.assert_array_equal(given, 1)
        return result

    for values, _, _ in ranks(2)(work):
        assert values.dtype == dtype
        np.testing.assert_array_equal(values, np.repeat(weights, 2)[:, np.newaxis] * np.ones(3))


@BOTH_WAYS
def test_sum_of_no_rows_is_empty(ranks, size, call):
    values, indices = np.zeros((0, 3), np.float32), np.zeros(0, np.int32)
    for shape in (None, [8, 3]):
        for rows, places, _ in ranks(size)(
            lambda group, shape=shape: summed(group, call, values, indices, shape, keep_rows=False)
        ):
            assert (rows.shape, rows.dtype) == ((0, 3), np.float32)
            assert (places.shape, places.dtype) == ((0,), np.int32)


def test_rows_of_unknown_static_shape_are_gathered(ranks):
    """The gradient of a gather from a variable whose shape the graph does not know."""

    def work(group):
        @tf.function(input_signature=[tf.TensorSpec(None), tf.TensorSpec([None], tf.int32)])
        def all_reduce(values, indices):
            (slices,) = Slices(group).all_reduce([tf.IndexedSlices(tf.ensure_shape(values, [None, None]), indices)])
            return slices

        return all_reduce(tf.fill([group.rank, 3], 5.0), tf.fill([group.rank], 2))

    for slices in ranks(2)(work):
        np.testing.assert_array_equal(slices.values, [[5, 5, 5]])
        np.testing.assert_array_equal(slices.indices, [2])


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
def test_components_may_be_lists(ranks, call):
    """As users give them to `tf.IndexedSlices`."""

    def work(group):
        def all_reduce():
            return Slices(group).all_reduce([tf.IndexedSlices([[1.0]], [group.rank], [9, 1])])[0]

        return call(all_reduce)

    for slices in ranks(2)(work):
        assert slices.indices.numpy().tolist() == [0, 1]
        assert slices.dense_shape.numpy().tolist() == [9, 1]


@pytest.mark.parametrize("call", [eagerly, in_a_graph])
def test_single_process_keeps_or_weights_its_rows(call):
    group = world.current().group
    values, indices = np.array([[1.0, np.nan], [2.0, 3.0]]), np.array([4, 4])
    rows, places, shape = summed(group, call, values, indices, [5, 2], keep_rows=False)
    np.testing.assert_array_equal(rows, values)
    np.testing.assert_array_equal(places, indices)
    assert shape.tolist() == [5, 2]
    for weight in (0.0, 0.5):
        rows, _, _ = summed(group, call, values, indices, weight=tf.constant(weight, tf.float64))
        np.testing.assert_array_equal(rows, weight * values if weight else np.zeros((2, 2)))


def test_weight_with_contributes_or_integers_raises():
    weight = tf.constant(1.0, tf.float64)
    with pytest.raises(ValueError, match="takes either weight or contributes; got both"):
        summed(world.current().group, eagerly, *rows_of(0), contributes=tf.constant(True), weight=weight)
    with pytest.raises(ValueError, match=r"floating-point or complex tensors; got \['int32'\]"):
        summed(world.current().group, eagerly, *rows_of(0, np.int32), weight=weight)


@pytest.mark.parametrize(("rows", "is_dense"), [(3, True), (6, False)])
@pytest.mark.parametrize("size", [2, 4])
def test_rows_are_summed_densely_when_twice_the_variable_is_smaller(ranks, size, rows, is_dense):
    """Gathered, 5 rows of 32 bytes with their indices on each rank; dense, twice 3 or 6 rows of 24 bytes for each."""

    def work(group):
        values, indices = np.ones((5, 3)), np.array([0, 0, 0, 0, 3])
        return summed(group, eagerly, values, indices, [rows * size, 3], keep_rows=False)

    for values, _, _ in ranks(size)(work):
        assert len(values) == (rows * size if is_dense else 5 * size)
        assert values.sum() == 3 * 5 * size


@BOTH_WAYS
@pytest.mark.parametrize("dtype", DTYPES)
def test_duplicate_rows_are_added_on_the_host_with_gpus(ranks, size, call, dtype, monkeypatch):
    """A GPU would add a row's occurrences in another order on each rank. Those that there are not are pretended."""
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])

    def work(group):
        return summed(group, call, np.full((2, 3), group.rank + 1).astype(dtype), np.array([7, group.rank]), [9, 3])

    for values, indices, shape in ranks(size)(work):
        assert values.dtype == dtype
        assert indices.tolist() == [7, *range(size)]
        expected = [sum(range(1, size + 1)), *range(1, size + 1)]
        np.testing.assert_array_equal(values, np.array([[total] * 3 for total in expected]).astype(dtype))
        assert shape.tolist() == [9, 3]


@pytest.mark.parametrize("is_unique", [True, False])
def test_rows_that_a_graph_has_made_distinct_are_distinct_over_all_ranks(ranks, is_unique):
    """As in the gradient of a lookup of sparse ids, whose rows optimizers may square."""

    def work(group):
        @tf.function
        def gradient():
            ids = tf.constant([7, group.rank, 7])
            rows = tf.reshape(tf.unique(ids)[0], [-1]) if is_unique else ids
            (total,) = Slices(group).all_reduce(
                [tf.IndexedSlices(tf.ones([tf.size(rows), 2]), tf.cast(rows, tf.int64))]
            )
            return total.values, total.indices

        return [tensor.numpy().tolist() for tensor in gradient()]

    for values, indices in ranks(2)(work):
        if is_unique:
            assert (values, indices) == ([[2, 2], [1, 1], [1, 1]], [7, 0, 1])
        else:
            assert (values, indices) == ([[1, 1]] * 6, [7, 0, 7, 7, 1, 7])
