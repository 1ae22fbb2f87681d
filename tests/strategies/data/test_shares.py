import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.data import shares
from tfdist.strategies.data.shares import Share, Shares, as_share, batch_size, weighed


def ragged(*rows):
    return tf.ragged.constant(rows, tf.float32, ragged_rank=1)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (np.zeros((3, 2)), 3),
        ((tf.zeros([4, 1]), tf.zeros([9])), 4),  # of the first component
        ({"b": tf.zeros([5]), "a": tf.zeros([6])}, 6),
        (ragged([1, 2], [3], [], [4, 5, 6]), 4),
        (tf.sparse.from_dense(tf.eye(7)), 7),
        ((None, tf.zeros([2])), 2),
        ({"a": tf.constant(5.0), "b": tf.zeros([3, 2])}, 3),  # a scalar has no rows
        (tf.constant(1.0), 1),  # one sample, which is not batched
        ((), 0),
        (Share(tf.zeros([1, 3]), tf.constant(0, tf.int64)), 0),  # its row is none
    ],
)
def test_batch_size(batch, samples):
    size = batch_size(batch)
    assert size.dtype == tf.int64
    assert size.numpy() == samples


def test_as_share_returns_shares_unchanged():
    share = as_share(tf.zeros([3, 2]))
    assert as_share(share) is share


def test_as_share_handles_unknown_batch_size_in_graph():
    """In a graph; some of the same shape are empty."""
    made = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2]), tf.TensorSpec([])])
    def share_of(x, scalar):
        share = as_share({"x": x, "z": scalar})
        made.append(share.data["x"].shape.as_list())
        return share.data["x"], share.data["z"], share.rows

    for samples in (0, 1, 3):
        x, scalar, rows = share_of(tf.ones([samples, 2]), 5.0)
        assert (rows.numpy(), scalar.numpy()) == (samples, 5.0)
        np.testing.assert_array_equal(x, np.ones((samples, 2)) if samples else np.zeros((1, 2)))
    assert made[0][1] == 2


def test_a_static_size_of_zero():
    share = as_share((tf.zeros([0, 2, 3]), tf.zeros([0], tf.string)))
    assert [component.shape.as_list() for component in share.data] == [[1, 2, 3], [1]]
    assert share.rows.numpy() == 0


def test_weights_of_all_replicas_add_up_to_one():
    made = Shares(1)
    for rows, total, weight, inverse in [(3, 4, 0.75, 4 / 3), (0, 4, 0.0, 0.0), (0, 0, 0.0, 0.0), (5, 5, 1.0, 1.0)]:
        made.set_total(tf.constant(total, tf.int64))
        with made.replica(tf.constant(rows, tf.int64)):
            assert made.weight().dtype == tf.float64
            assert made.weight().numpy() == weight
            assert made.inverse_weight().numpy() == pytest.approx(inverse)
            assert made.is_empty().numpy() == (rows == 0)
            assert (made.rows().numpy(), made.total().numpy()) == (rows, total)
    assert [rows.numpy() for rows in made.rows_of_replicas()] == [5]


def test_a_replica_is_active_in_its_step_only():
    made = Shares(1)
    assert not made.active
    assert not made.step_is_shared
    with made.replica(tf.constant(1, tf.int64)):
        assert made.active
        assert made.step_is_shared
    assert not made.active
    with pytest.raises(ZeroDivisionError), made.replica(tf.constant(1, tf.int64)):
        raise ZeroDivisionError
    assert not made.step_is_shared


def test_replicas_have_rows_of_their_own():
    made = Shares(2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def replica():
        with made.replica(tf.constant(7, tf.int64)):
            return made.rows()

    assert strategy.run(replica).numpy() == 7
    assert [rows.numpy() for rows in made.rows_of_replicas()] == [7, 0]


def test_functions_that_were_traced_before_read_the_numbers_of_their_step():
    made = Shares(1)

    @tf.function
    def weight():
        return made.weight()

    made.set_total(tf.constant(8, tf.int64))
    for rows in (2, 4):
        with made.replica(tf.constant(rows, tf.int64)):
            assert weight().numpy() == rows / 8


@pytest.mark.parametrize("dtype", [tf.float16, tf.float32, tf.bfloat16, tf.complex64])
def test_weighed(dtype):
    value = tf.cast([1.0, -2.0], dtype)
    result = weighed(value, tf.constant(0.5, tf.float64))
    assert result.dtype == dtype
    np.testing.assert_array_equal(tf.cast(result, tf.complex64), [0.5, -1])


def test_zero_weight_turns_nan_and_infinity_into_zero():
    """The values of an empty share may be NaN, from a mean over no samples."""
    values = tf.constant([np.nan, np.inf, -np.inf, 1.0])
    np.testing.assert_array_equal(weighed(values, tf.constant(0.0, tf.float64)), 0)
    slices = tf.IndexedSlices(tf.constant([[np.nan], [2.0]]), tf.constant([4, 1]), tf.constant([5, 1]))
    result = weighed(slices, tf.constant(0.0, tf.float64))
    np.testing.assert_array_equal(result.values, 0)
    np.testing.assert_array_equal(weighed(slices, tf.constant(3.0, tf.float64)).values[1], 6)
    assert result.indices is slices.indices
    assert result.dense_shape is slices.dense_shape


def test_a_row_of_zeros_of_every_kind_has_the_components_shape():
    for component in (tf.zeros([0, 2, 3], tf.int32), tf.zeros([0], tf.bool)):
        row = shares._row_of_zeros(component)
        assert row.dtype == component.dtype
        assert row.shape.as_list() == [1, *component.shape.as_list()[1:]]
    assert shares._row_of_zeros(ragged([1, 2])[:0]).to_list() == [[]]
    sparse = shares._row_of_zeros(tf.sparse.from_dense(tf.zeros([0, 3])))
    np.testing.assert_array_equal(tf.sparse.to_dense(sparse), np.zeros((1, 3)))
