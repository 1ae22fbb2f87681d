import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS
from tfdist.engine.counts import CountReducer


def raising(total):
    if total:
        raise StopIteration


@BOTH_WAYS
def test_tensor_and_host_counts_are_summed(ranks, size, call):
    def work(group):
        learned = []
        counts = CountReducer(group, "things", lambda: 10 + group.rank, learned.append)
        total = call(counts.sum, tf.constant([group.rank, 1], tf.int64))
        return total.numpy().tolist(), learned

    for total, learned in ranks(size)(work):
        assert total == [sum(range(size)), size]
        assert learned == [10 * size + sum(range(size))]


@BOTH_WAYS
def test_tensors_and_host_counts_are_gathered(ranks, size, call):
    """The host's numbers are learned as their sum."""

    def work(group):
        learned = []
        counts = CountReducer(group, "things", lambda: 10 * group.rank, learned.append)
        rows = call(counts.gather, tf.constant([group.rank, 1], tf.int64))
        return rows.numpy().tolist(), learned

    for rows, learned in ranks(size)(work):
        assert rows == [[rank, 1] for rank in range(size)]
        assert learned == [10 * sum(range(size))]


@BOTH_WAYS
def test_nonzero_count_of_one_rank_stops_all_ranks(ranks, size, call):
    def work(group):
        wishes = [0, 0]
        counts = CountReducer(group, "things", lambda: wishes[0], raising)
        numbers = tf.constant([1], tf.int64)
        function = counts.sum if call.__name__ == "eagerly" else tf.function(counts.sum)
        before = function(numbers).numpy().tolist()
        wishes[0] = int(group.rank == 1)
        with pytest.raises(tf.errors.OutOfRangeError):
            function(numbers)
        wishes[0] = 0
        return before, function(numbers).numpy().tolist()

    assert ranks(size)(work) == [([size], [size])] * size


def test_the_numbers_that_are_given_are_not_changed(ranks):
    def work(group):
        given = np.array([3, 4])
        CountReducer(group, "things", lambda: 0, raising).sum(tf.constant(given))
        return given.tolist()

    assert ranks(2)(work) == [[3, 4]] * 2
