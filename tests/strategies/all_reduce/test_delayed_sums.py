import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.compression import TopK
from tfdist.compression.compressor import Compressor
from tfdist.strategies.all_reduce.delayed_sums import DelayedSums


def variables():
    return [keras.Variable(np.zeros((30, 40)), name="w"), keras.Variable(np.zeros(3), name="b")]


@pytest.mark.parametrize("in_graph", [False, True])
def test_sums_are_those_of_the_step_before(ranks, in_graph):
    def work(group):
        sums = DelayedSums(group, "a", variables(), None)

        def step(number):
            gradients = [tf.fill([30, 40], number), tf.fill([3], 10 * number)]
            ready, totals = sums.exchanged(gradients, tf.constant((0.25, 0.75)[group.rank], tf.float64))
            return [tf.cast(ready, number.dtype), totals[0][0, 0], totals[1][2]]

        step = tf.function(step) if in_graph else step
        outputs = [[float(output) for output in step(tf.constant(float(number + group.rank)))] for number in (1, 2, 3)]
        last = sums.last()
        assert sums.last() is None
        return outputs, last[0][5, 5], last[1][1], dict(sums.staleness)

    for outputs, matrix, vector, staleness in ranks(2)(work):
        assert outputs == [[0, 0, 0], [1, 1.75, 17.5], [1, 2.75, 27.5]]
        assert (matrix, vector) == (3.75, 37.5)
        assert staleness == {0: 1, 1: 2}


def test_sums_travel_while_the_next_step_computes(ranks):
    """And do not wait for somebody who takes them."""

    def work(group):
        sums = DelayedSums(group, "a", variables()[1:], None)
        sums.exchanged([tf.ones([3])], tf.constant(0.5, tf.float64))
        end = time.monotonic() + 100
        while not all(pending.done for pending, *_ in sums._under_way.pending):
            assert time.monotonic() < end
            time.sleep(1e-3)
        return sums.last()[0].tolist()

    assert ranks(2)(work) == [[1.0] * 3] * 2


def test_a_process_without_samples_counts_for_nothing(ranks):
    def work(group):
        sums = DelayedSums(group, "a", variables()[1:], None)
        gradients = [tf.fill([3], float("nan") if group.rank else 2.0)]
        sums.exchanged(gradients, tf.constant(1.0 - group.rank, tf.float64))
        return sums.last()[0].tolist()

    assert ranks(2)(work) == [[2.0] * 3] * 2


def test_compression_residuals_are_sent_in_later_steps(ranks):
    def work(group):
        compressor = Compressor(TopK(0.1), group.rank, group.size)
        sums = DelayedSums(group, "a", variables(), compressor)
        values = np.random.default_rng(group.rank).normal(size=(30, 40))
        total = np.zeros_like(values)
        for _ in range(60):
            sums.exchanged([tf.constant(values), tf.ones([3], tf.float64)], tf.constant(0.5, tf.float64))
            total += sums.last()[0]
        return total / 60, values

    (average, first), (_, second) = ranks(2)(work)
    assert np.abs(average - (first + second) / 2).max() < 0.3


def test_single_rank_gets_its_previous_gradients(ranks):
    sums = DelayedSums(ranks(1).groups[0], "a", variables()[1:], None)
    assert not sums.exchanged([tf.ones([3])], tf.constant(1.0, tf.float64))[0]
    ready, (total,) = sums.exchanged([tf.zeros([3])], tf.constant(1.0, tf.float64))
    assert ready
    assert total.numpy().tolist() == [1.0] * 3


def test_staleness_begins_anew_when_the_last_sums_are_taken(ranks):
    """Two epochs of three steps: the first gradients of each are used before an update."""

    def work(group):
        sums = DelayedSums(group, "a", variables()[1:], None)
        for _ in range(2):
            for _ in range(3):
                sums.exchanged([tf.ones([3])], tf.constant(0.5, tf.float64))
            assert sums.last() is not None
        return dict(sums.staleness)

    assert ranks(2)(work) == [{0: 2, 1: 4}] * 2
