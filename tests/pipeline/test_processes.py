"""What the processes of a pipeline tell each other in a step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.pipeline.processes import OTHER_DATA, PipelineCollectives


def graph(function):
    return tf.function(function, autograph=False)


@pytest.mark.parametrize("way", [lambda function: function, graph])
def test_data_are_agreed_on_and_losses_summed(ranks, way):
    def work(group):
        processes = PipelineCollectives(group, "m")

        def total(x):
            losses = [tf.constant(0.5), tf.constant(2.0)] if group.rank else []
            agreed = processes.agreed({"x": x, "words": tf.constant(["a", "b"]), "none": None})
            return processes.total(losses) + tf.cast(agreed["x"][-1], tf.float64)

        return float(way(total)(tf.range(10000.0)))

    assert ranks(2)(work) == [10001.5, 10001.5]


@pytest.mark.parametrize("change", ["order", "size"])
def test_different_data_between_processes_raise(ranks, change):
    def work(group):
        x = np.arange(12.0, dtype=np.float32).reshape(6, 2)
        if group.rank:
            x = x[[1, 0, 2, 3, 4, 5]] if change == "order" else x[:5]
        with pytest.raises(tf.errors.InvalidArgumentError, match=OTHER_DATA):
            PipelineCollectives(group, "m").agreed([tf.constant(x)])

    ranks(2)(work)


def test_give_copies_variables_of_one_worker(ranks):
    def work(group):
        variables = [keras.Variable(np.full([2], group.rank)), keras.Variable(10 * group.rank, dtype="int32")]
        PipelineCollectives(group, "m").give(variables, 1)
        return [variable.numpy().tolist() for variable in variables]

    assert ranks(3)(work) == [[[1.0, 1.0], 10]] * 3


def test_share_broadcasts_and_summed_adds_over_some_ranks(ranks):
    spec = [tf.TensorSpec([None, 2]), tf.TensorSpec([], tf.int32)]

    def work(group):
        processes = PipelineCollectives(group, "m")
        tensors = [tf.ones([3, 2]), tf.constant(7)] if group.rank == 2 else None
        matrix, scalar = processes.share(tensors, spec, 2)
        gradient = tf.constant([float(group.rank)])
        total = processes.summed([gradient], (0, 2), [tf.TensorSpec([1], name="w")]) if group.rank != 1 else [[-1.0]]
        return matrix.shape.as_list(), int(scalar), float(total[0][0])

    assert ranks(3)(work) == [([3, 2], 7, 2.0), ([3, 2], 7, -1.0), ([3, 2], 7, 2.0)]


@pytest.mark.parametrize("way", [lambda function: function, graph])
def test_sums_of_sparse_gradients_keep_rows_unless_a_worker_has_a_dense_one(ranks, way):
    """Both workers look up words of the first variable, one of them those of the second, and the third is tied."""
    specs = [tf.TensorSpec([4, 2], name=name) for name in ("both", "one", "tied")]

    def work(group):
        processes = PipelineCollectives(group, "m")

        def summed(rows):
            indices = tf.constant([1, group.rank], [tf.int32, tf.int64][group.rank])
            slices = tf.IndexedSlices(rows, indices, tf.constant([4, 2]))
            return processes.summed(
                [slices, *((None, tf.ones([4, 2])) if group.rank else (slices, slices))], (0, 1), specs
            )

        totals = []
        for number in range(2):
            function = way(summed)
            totals.append(function(tf.fill([2, 2], 1.0 + group.rank + number)))
        return totals

    for first, second in ranks(2)(work):
        for number, (both, one, tied) in enumerate((first, second)):
            assert both.indices.numpy().tolist() == [1, 0, 1, 1]
            np.testing.assert_array_equal(both.values[:, 0], [1 + number, 1 + number, 2 + number, 2 + number])
            assert one.indices.numpy().tolist() == [1, 0]
            np.testing.assert_array_equal(tied[:, 0], [2 + number, 2 + number, 1, 1])


def test_a_gradient_that_becomes_dense_stays_rows(ranks):
    """As the workers do not agree again: a worker that waited for another's answer might wait in vain."""

    def work(group):
        processes, spec = PipelineCollectives(group, "m"), [tf.TensorSpec([3, 1], name="words")]
        rows = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([2]))
        processes.summed([rows], (0, 1), spec)
        (total,) = processes.summed([tf.ones([3, 1]) if group.rank else rows], (0, 1), spec)
        return total.indices.numpy().tolist()

    assert ranks(2)(work) == [[2, 0, 1, 2]] * 2
