import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS
from tfdist import compression as c
from tfdist.optimizers.gradients import GradientAverager
from tfdist.optimizers.local_clipping import LocalClipping


def reduce_gradients(group, call, made, gradients, variables):
    """What `GradientAverager.reduced` gives."""
    reduced = call(lambda: made.reduced(gradients(group.rank), variables))
    return [None if gradient is None else tf.convert_to_tensor(gradient).numpy() for gradient in reduced]


@pytest.mark.parametrize(("float32_sums", "expected"), [(False, 256), (True, 258)])
def test_sums_of_half_precision_are_rounded_once_if_they_are_in_float32(ranks, float32_sums, expected):
    """Numbers of bfloat16 from 256 on are even: 256 + 1 is 256, but 256 + 1 + 1 is 258."""

    def work(group):
        averager = GradientAverager(group, average=False, float32_sums=float32_sums)
        (total,) = averager.reduced([tf.constant([1.0 if group.rank else 256.0], tf.bfloat16)], [tf.Variable([0.0])])
        return total.dtype, float(total[0])

    assert ranks(3)(work) == [(tf.bfloat16, expected)] * 3


@BOTH_WAYS
@pytest.mark.parametrize("average", [True, False])
def test_dense_and_sparse_gradients_are_reduced_none_stays(ranks, size, call, average):
    variables = [tf.Variable(tf.zeros([2])), tf.Variable(tf.zeros([3, 2])), tf.Variable(0.0)]

    def gradients(rank):
        rows = tf.IndexedSlices(tf.fill([2, 2], rank + 1.0), tf.constant([0, rank % 3]), tf.constant([3, 2]))
        return [tf.constant([rank, 1.0]), rows, None]

    def work(group):
        return reduce_gradients(group, call, GradientAverager(group, average), gradients, variables)

    dense = np.array([sum(range(size)), size], float)
    rows = np.zeros([3, 2])
    for rank in range(size):
        rows[0] += rank + 1
        rows[rank % 3] += rank + 1
    scale = size if average else 1
    for reduced in ranks(size)(work):
        np.testing.assert_allclose(reduced[0], dense / scale)
        np.testing.assert_allclose(reduced[1], rows / scale)
        assert reduced[2] is None


@BOTH_WAYS
@pytest.mark.parametrize("average", [True, False])
def test_reduced_gradients_are_differentiable_if_requested(ranks, size, call, average):
    """As for a penalty on gradients; a process's is its part of the derivative of the sum or mean over all."""

    def work(group):
        made, factor, sparse = (
            GradientAverager(group, average, is_differentiable=True),
            group.rank + 1.0,
            tf.Variable([[1.0]]),
        )
        x = tf.Variable(2.0)
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([1, 1]))

        def second():
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = factor * x**3
                total, _ = made.reduced([inner.gradient(loss, x), slices], [x, sparse])
                penalty = total**2
            return total, outer.gradient(penalty, x)

        return factor, *(float(result) for result in call(second))

    for factor, total, derivative in ranks(size)(work):
        scale = size if average else 1
        assert total == pytest.approx(12 * sum(range(1, size + 1)) / scale)
        upstream = 2 * total * (1 if average else size)  # of all processes, summed or averaged
        assert derivative == pytest.approx(upstream * 12 * factor)


def test_differentiable_averager_reduces_sparse_gradients_alone(ranks):
    def work(group):
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([group.rank]), tf.constant([3, 2]))
        made = GradientAverager(group, is_differentiable=True)
        (reduced,) = made.reduced([slices], [tf.Variable(tf.zeros([3, 2]))])
        return tf.convert_to_tensor(reduced).numpy(), made.reduced([None], [tf.Variable(0.0)])

    for reduced, none in ranks(2)(work):
        np.testing.assert_allclose(reduced, [[0.5, 0.5], [0.5, 0.5], [0, 0]])
        assert none == [None]


@pytest.mark.parametrize("as_dense", [True, False])
def test_sparse_gradients_stay_so_unless_asked(ranks, as_dense):
    def work(group):
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([group.rank]), tf.constant([3, 2]))
        (reduced,) = GradientAverager(group, sparse_as_dense=as_dense).reduced(
            [slices], [tf.Variable(tf.zeros([3, 2]))]
        )
        return isinstance(reduced, tf.IndexedSlices), tf.convert_to_tensor(reduced).numpy()

    for sparse, reduced in ranks(2)(work):
        assert sparse is not as_dense
        np.testing.assert_allclose(reduced, [[0.5, 0.5], [0.5, 0.5], [0, 0]])


@pytest.mark.parametrize(("scale", "expected"), [(True, 2.0), (False, 4.0)])
def test_gradients_of_local_variables_are_not_summed(ranks, scale, expected):
    """Given as Keras has them or as TensorFlow does."""

    def work(group):
        local, common = keras.Variable([0.0]), keras.Variable([0.0])
        made = GradientAverager(group, scale_local=scale)
        made.keep_local(local.value)
        gradient = tf.constant([4.0 * (group.rank == 0)])
        return [float(reduced[0]) for reduced in made.reduced([gradient, gradient], [local, common])]

    assert ranks(2)(work) == [[expected, 2.0], [0.0, 2.0]]


def test_clipping_comes_before_the_sum(ranks):
    def work(group):
        made = GradientAverager(group, clipping=LocalClipping(norm=1.0))
        return made.reduced([tf.constant([3.0, 4.0]) * (group.rank + 1)], [tf.Variable([0.0, 0.0])])[0].numpy()

    for reduced in ranks(2)(work):
        np.testing.assert_allclose(reduced, [0.6, 0.8], rtol=1e-6)


def test_only_dense_gradients_are_compressed(ranks):
    """Only of what is dense."""

    def work(group):
        variables = [tf.Variable(tf.zeros([64, 64]), name="kernel"), tf.Variable(tf.zeros([3, 1]))]
        made = GradientAverager(group, compression=c.TopK(0.25))
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([group.rank]), tf.constant([3, 1]))
        dense, rows = made.reduced([tf.reshape(tf.range(1.0, 4097), [64, 64]), slices], variables)
        return dense.numpy().ravel(), tf.convert_to_tensor(rows).numpy().ravel()

    for dense, rows in ranks(2)(work):
        np.testing.assert_array_equal(dense, np.where(np.arange(4096) < 3072, 0, np.arange(1, 4097)))
        np.testing.assert_allclose(rows, [0.5, 0.5, 0])


def test_combined_applies_the_given_function(ranks):
    results = ranks(2)(
        lambda group: GradientAverager(group).combined([tf.constant([group.rank])], np.maximum)[0].numpy()
    )
    assert [result.tolist() for result in results] == [[1], [1]]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"average": False}, False),
        ({"adaptive": True}, False),
        ({"compression": c.Int8()}, False),
        ({"clipping": LocalClipping(norm=1.0)}, False),
    ],
)
def test_averages_is_true_only_for_unmodified_means(ranks, arguments, expected):
    """Else their noise cannot be measured."""
    assert GradientAverager(ranks(2).groups[0], **arguments).averages is expected
