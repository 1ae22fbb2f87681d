import numpy as np
import tensorflow as tf

from tests.engine.ranks import BOTH_WAYS
from tfdist.engine.sums import Sums


@BOTH_WAYS
def test_dense_tensors_and_slices_are_reduced_together(ranks, size, call):
    def work(group):
        def reduced(mean):
            slices = tf.IndexedSlices(tf.fill([1, 2], group.rank + 1.0), tf.constant([group.rank]), tf.constant([9, 2]))
            values = [tf.constant([1.0 * group.rank]), slices, tf.ones([2, 2])]
            return Sums(group).all_reduce(values, ["a", "b", "c"], mean=mean)

        return [call(lambda mean=mean: reduced(mean)) for mean in (False, True)]

    for results in ranks(size)(work):
        for (vector, slices, matrix), scale in zip(results, (1, size), strict=True):
            np.testing.assert_allclose(vector, [sum(range(size)) / scale])
            np.testing.assert_allclose(slices.values[:, 0], [(rank + 1) / scale for rank in range(size)], rtol=1e-6)
            np.testing.assert_array_equal(slices.indices, range(size))
            np.testing.assert_allclose(matrix, np.full([2, 2], size / scale))


def test_weights_apply_to_tensors_and_slices(ranks):
    def work(group):
        slices = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), tf.constant([1, 1]))
        weight = tf.constant(0.25 + 0.5 * group.rank, tf.float64)
        return Sums(group).all_reduce([tf.constant([4.0]), slices], ["a", "b"], weight=weight)

    for dense, slices in ranks(2)(work):
        np.testing.assert_allclose(dense, [4.0])
        np.testing.assert_allclose(slices.values, [[0.25], [0.75]])


@BOTH_WAYS
def test_collectives_of_tensors_and_of_slices_have_their_names(ranks, size, call, monkeypatch):
    """In messages, of who is missing in which."""
    everyone = ranks(size)
    seen = [[] for _ in everyone.groups]

    def work(group):
        for name in ("post", "run"):
            begin = getattr(group, name)

            def noting(*given, begin=begin, **more):
                seen[group.rank].append(more["contents"])
                return begin(*given, **more)

            monkeypatch.setattr(group, name, noting)
        slices = [tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])) for _ in range(2)]
        call(lambda: Sums(group).all_reduce([tf.ones([1]), *slices], ["kernel", "words", "authors"]))

    everyone(work)
    assert seen == [["kernel", "words, authors", "words, authors"]] * size, "of rows, and of their indices"
