import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.strategies.ranked import in_step, on_ranks
from tfdist.private import tensorflow as private
from tfdist.strategies.all_reduce import extended

OPS = pytest.mark.parametrize("op", ["SUM", "MEAN"])


def reduced(strategy, op, *values, options=None):
    """Over the replicas, as `ReplicaContext.all_reduce` has it."""
    return strategy.run(lambda: tf.distribute.get_replica_context().all_reduce(op, list(values), options))


@OPS
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64, np.int32])
def test_all_reduce_of_dense_values_sums_or_averages(ranks, op, size, dtype):
    """Several at once, of several shapes; a mean of integers is rounded towards zero."""

    def work(strategy):
        value = np.array([2 * strategy.rank - 1, 3]).astype(dtype)
        return reduced(strategy, op, tf.constant(value), tf.constant(value[np.newaxis]))

    total = np.array([sum(2 * rank - 1 for rank in range(size)), 3 * size])
    expected = total if op == "SUM" else total / size
    for vector, matrix in on_ranks(ranks(size), work):
        np.testing.assert_allclose(vector.numpy().astype(float), expected, rtol=1e-2)
        assert matrix.shape == (1, 2)


@OPS
def test_sparse_values_keep_every_occurrence(ranks, op):
    def work(strategy):
        slices = tf.IndexedSlices(tf.fill([strategy.rank + 1, 2], 2.0), tf.fill([strategy.rank + 1], 3), [9, 2])
        return reduced(strategy, op, slices, tf.constant(1.0))[0]

    for result in on_ranks(ranks(2), work):
        np.testing.assert_array_equal(result.values, np.full((3, 2), 2.0 if op == "SUM" else 1.0))
        np.testing.assert_array_equal(result.indices, [3, 3, 3])


@OPS
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("by_collectives", [False, True])
def test_values_of_several_devices_of_each_process(ranks, op, size, by_collectives, monkeypatch):
    """Dense of two kinds of number, and sparse; also by the collectives that TensorFlow uses among GPUs."""
    monkeypatch.setattr(extended, "_on_cpu", lambda devices: not by_collectives)

    def work(strategy):
        def replica():
            context = tf.distribute.get_replica_context()
            number = 2 * tf.cast(context.replica_id_in_sync_group + 1, tf.float32)
            slices = tf.IndexedSlices(tf.fill([1, 2], number), tf.constant([3]), tf.constant([9, 2]))
            return context.all_reduce(op, [tf.fill([3], number), tf.cast(number, tf.int32), slices])

        run = tf.function(lambda: strategy.experimental_local_results(strategy.run(replica)))
        dense, whole, sparse = run()[0]
        return dense, whole, tf.math.unsorted_segment_sum(sparse.values, sparse.indices, 9)[3]

    numbers = 2.0 * np.arange(1, 2 * size + 1)
    expected = numbers.sum() if op == "SUM" else numbers.mean()
    for dense, whole, sparse in on_ranks(ranks(size), work, devices=("CPU:0", "CPU:1")):
        np.testing.assert_allclose(dense, [expected] * 3)
        np.testing.assert_allclose(whole, expected)
        np.testing.assert_allclose(sparse, [expected] * 2)


@pytest.mark.parametrize("size", [1, 2])
def test_values_are_packed_for_the_collectives_of_a_process(ranks, size, monkeypatch):
    """One for each device and dtype, and not for each value; and so are the copies of sums over processes."""
    monkeypatch.setattr(extended, "_on_cpu", lambda devices: False)

    def work(strategy):
        def replica():
            values = [
                tf.fill([number], tf.constant(1, dtype)) for number in (1, 2, 3) for dtype in (tf.float32, tf.float64)
            ]
            return tf.distribute.get_replica_context().all_reduce("SUM", values)

        run = tf.function(lambda: strategy.experimental_local_results(strategy.run(replica)))
        graph = run.get_concrete_function().graph
        collectives = [node for node in graph.get_operations() if node.type == "CollectiveReduceV2"]
        copies = [
            node
            for node in graph.get_operations()
            if node.type == "Identity" and node.device.endswith("CPU:1") and node.inputs[0].device[-5:] != "CPU:1"
        ]
        return len(collectives), len(copies), [[value.numpy().tolist() for value in values] for values in run()]

    for collectives, copies, of_devices in on_ranks(ranks(size), work, devices=("CPU:0", "CPU:1")):
        assert collectives == 2 * 2
        assert copies == (0 if size == 1 else 2)
        assert of_devices == 2 * [[[2.0 * size] * number for number in (1, 1, 2, 2, 3, 3)]]


@OPS
def test_values_of_one_and_of_several_devices_together(ranks, op):
    def work(strategy):
        extended = strategy.extended
        both = strategy.experimental_distribute_values_from_function(lambda context: tf.constant([4.0, 8.0]))
        with strategy.scope():
            one, several = extended.batch_reduce_to(op, [(tf.constant(2.0), "CPU:0"), (both, both)])
            assert not extended.batch_reduce_to(op, []), "none at all"
        return one.numpy(), strategy.experimental_local_results(several)[0].numpy()

    for one, several in on_ranks(ranks(2), work, devices=("CPU:0", "CPU:1")):
        assert one == (4.0 if op == "SUM" else 2.0)
        np.testing.assert_array_equal(several, [16.0, 32.0] if op == "SUM" else [4.0, 8.0])


@pytest.mark.parametrize("options", [None, private.WeighedOptions()], ids=["a user's", "of gradients"])
def test_rows_are_added_up_once_for_the_gpus_of_a_process(ranks, options, monkeypatch):
    """Each would add a row's occurrences in its own order. GPUs that there are not are pretended."""
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])

    def work(strategy):
        def replica():
            slices = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([3, 3]), tf.constant([9, 1]))
            return tf.distribute.get_replica_context().all_reduce("SUM", [slices], options)

        return [copy for (copy,) in strategy.experimental_local_results(strategy.run(replica))]

    for copies in on_ranks(ranks(1), work, devices=("CPU:0", "CPU:1")):
        assert len(copies) == 2
        for rows in copies:
            np.testing.assert_array_equal(rows.indices, [3])
            np.testing.assert_array_equal(rows.values, [[4.0]])


def test_sparse_values_sum_duplicates_without_keep_rows(ranks):
    def work(strategy):
        slices = tf.IndexedSlices(tf.ones([9, 2]), tf.zeros([9], tf.int32), tf.constant([3, 2]))
        return reduced(strategy, "SUM", slices)[0]

    for result in on_ranks(ranks(2), work, keep_rows=False):
        np.testing.assert_array_equal(result.values, [[18, 18], [0, 0], [0, 0]])


@OPS
def test_empty_share_contributes_zero_to_all_reduce(ranks, op):
    """Dense and sparse, whatever it is; a mean is over replicas all the same."""

    def work(strategy):
        value = [np.nan, 4.0][strategy.rank]
        slices = tf.IndexedSlices(tf.fill([1, 2], value), tf.constant([strategy.rank]), [9, 2])
        return in_step(
            strategy,
            strategy.rank,
            1,
            lambda: tf.distribute.get_replica_context().all_reduce(op, [tf.constant(value), slices]),
        )

    for dense, sparse in on_ranks(ranks(2), work):
        expected = 4.0 if op == "SUM" else 2.0
        assert dense.numpy() == expected
        np.testing.assert_array_equal(sparse.values, [[expected] * 2])
        np.testing.assert_array_equal(sparse.indices, [1])


def test_all_reduce_weights_gradients_by_options(ranks):
    def work(strategy):
        weight = tf.constant([0.25, 0.75][strategy.rank], tf.float64)
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([strategy.rank]), [9, 1])
        options = private.WeighedOptions((), weight)
        return in_step(
            strategy,
            1,
            2,
            lambda: tf.distribute.get_replica_context().all_reduce("SUM", [tf.constant(8.0), slices], options),
        )

    for dense, sparse in on_ranks(ranks(2), work):
        assert dense.numpy() == 8.0
        np.testing.assert_array_equal(sparse.values, [[0.25], [0.75]])


def test_gradient_rows_of_positions_are_summed_across_ranks(ranks):
    """Positions of a sequence are the same on all replicas, and one process has them once."""

    def work(strategy):
        table = tf.Variable(tf.ones([5, 2]))

        @tf.function
        def step(words):
            def replica():
                sums = []
                for indices in (tf.range(3), words):
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_sum(tf.gather(table, indices))
                    gradient = tape.gradient(loss, table)
                    sums.append(
                        tf.distribute.get_replica_context().all_reduce("SUM", [gradient], private.WeighedOptions())[0]
                    )
                return sums

            return in_step(strategy, 1, 2, replica)

        return step(tf.constant([strategy.rank, strategy.rank]))

    for positions, words in on_ranks(ranks(2), work):
        np.testing.assert_array_equal(positions.values, np.full((3, 2), 2.0))
        np.testing.assert_array_equal(positions.indices, [0, 1, 2])
        np.testing.assert_array_equal(words.values, np.ones((4, 2)))
        np.testing.assert_array_equal(words.indices, [0, 0, 1, 1])


@pytest.mark.parametrize("axis", [0, 1])
def test_gather(ranks, axis):
    """Also of different sizes along the axis."""

    def work(strategy):
        shape = [2, 2]
        shape[axis] = strategy.rank + 1
        value = tf.fill(shape, strategy.rank)
        return strategy.gather(value, axis=axis), strategy.run(
            lambda: tf.distribute.get_replica_context().all_gather(value, axis=axis)
        )

    expected = np.concatenate([np.full((1, 2), 0), np.full((2, 2), 1)])
    for gathered, in_replica in on_ranks(ranks(2), work):
        np.testing.assert_array_equal(gathered, expected if axis == 0 else expected.T)
        np.testing.assert_array_equal(in_replica, gathered)


def test_collectives_are_named_after_variables_or_operations(ranks):
    """In messages; or as the operation that yields them."""
    both, seen = ranks(2), {}

    def work(strategy):
        with strategy.scope():
            variable = tf.Variable([1.0], name="weights")
        engine = strategy.extended.group.engine
        post = engine.post
        engine.post = lambda *args, **kwargs: (seen.setdefault(strategy.rank, []).append(kwargs["contents"]),
                                               post(*args, **kwargs))[1]  # fmt: skip
        strategy.extended.reduce_to("SUM", tf.constant([2.0]), variable)
        tf.function(lambda x: strategy.reduce("SUM", tf.square(x, name="squares"), axis=None))(tf.constant(2.0))

    on_ranks(both, work)
    assert seen[0] == seen[1]
    assert [name.rpartition("/")[2] for name in seen[0]] == ["weights:0", "squares"]
