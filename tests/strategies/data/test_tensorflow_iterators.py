"""Iterators of TensorFlow: those of tfdist's strategies agree on another batch, others count by themselves."""

import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import Ranked, on_ranks
from tfdist.strategies.data import tensorflow_iterators


@pytest.mark.parametrize("lengths", [(2, 3), (3, 3), (0, 2)])
def test_all_ranks_step_until_longest_dataset_ends(ranks, lengths):
    """A function that steps through a distributed iterator ends on all ranks at once; who has no data helps."""

    def work(strategy):
        dataset = tf.data.Dataset.range(lengths[strategy.rank]).batch(1)
        data = strategy.distribute_datasets_from_function(lambda context: dataset)

        @tf.function
        def total():
            steps = tf.constant(0)
            for _ in data:
                steps += 1
            return steps

        return int(total())

    assert on_ranks(ranks(2), work) == [max(lengths)] * 2


def test_mirrored_strategy_reads_its_own_batches(ranks):
    Ranked(ranks(1).groups[0])  # installs the seams
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    data = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(2))
    assert [np.asarray(batch).tolist() for batch in data] == [[0, 1], [2, 3]]
    seam = tensorflow_iterators.private.input_lib._calculate_replicas_with_values
    assert seam.__name__ == "_calculate_replicas_with_values"
