import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS
from tfdist.engine.batches import BatchExchange

FEATURES = 6


def part(rank):
    """Two rows on rank 0, three on rank 1, none on rank 2, each with features of three steps."""
    rows = (2, 3, 0)[rank]
    return 100.0 * rank + np.arange(rows * 3 * FEATURES, dtype="float32").reshape(rows, 3, FEATURES)


def whole(size):
    return np.concatenate([part(rank) for rank in range(size)])


def counts_of(size):
    return np.array([2, 3, 0][:size])


@BOTH_WAYS
@pytest.mark.parametrize("are_known", [False, True])
def test_gather(ranks, size, call, are_known):
    def work(group):
        counts = tf.constant(counts_of(size)) if are_known else None
        return call(lambda rows: BatchExchange(group).gathered(rows, counts), tf.constant(part(group.rank)))

    for rows, counts in ranks(size)(work):
        np.testing.assert_array_equal(rows, whole(size))
        np.testing.assert_array_equal(counts, counts_of(size))


@BOTH_WAYS
def test_sum_gives_each_its_rows(ranks, size, call):
    def work(group):
        terms = tf.constant(whole(size) * (group.rank + 1))
        return call(lambda given: BatchExchange(group).scattered_sum(given, tf.constant(counts_of(size))), terms)

    factor = sum(range(1, size + 1))
    for rank, rows in enumerate(ranks(size)(work)):
        np.testing.assert_array_equal(rows, part(rank) * factor)


@BOTH_WAYS
@pytest.mark.parametrize("are_known", [False, True])
def test_features_of_all_rows_and_back(ranks, size, call, are_known):
    def work(group):
        counts = tf.constant(counts_of(size)) if are_known else None

        def there_and_back(rows):
            exchange = BatchExchange(group)
            features, found = exchange.to_features(rows, counts)
            return features, found, exchange.to_rows(features, found)

        return call(there_and_back, tf.constant(part(group.rank)))

    width = FEATURES // size
    for rank, (features, counts, rows) in enumerate(ranks(size)(work)):
        np.testing.assert_array_equal(features, whole(size)[..., rank * width : (rank + 1) * width])
        np.testing.assert_array_equal(counts, counts_of(size))
        np.testing.assert_array_equal(rows, part(rank))


def test_other_numbers_of_rows_raise(ranks):
    def work(group):
        with pytest.raises(ValueError, match=r"the rows of all processes, \[2, 3\]; got 4"):
            BatchExchange(group).to_rows(tf.zeros([4, 2]), tf.constant([2, 3], tf.int64))

    ranks(2)(work)


def test_half_precision(ranks):
    """Dtypes that MPI does not know are sent, too."""

    def work(group):
        rows = tf.cast(part(group.rank), tf.bfloat16)
        gathered, counts = BatchExchange(group).gathered(rows)
        return BatchExchange(group).scattered_sum(gathered, counts)

    for rank, rows in enumerate(ranks(2)(work)):
        assert rows.dtype == tf.bfloat16
        np.testing.assert_array_equal(
            tf.cast(rows, tf.float32), 2 * tf.cast(tf.cast(part(rank), tf.bfloat16), "float32")
        )
