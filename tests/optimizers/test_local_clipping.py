import numpy as np
import pytest
import tensorflow as tf

from tfdist.optimizers.local_clipping import LocalClipping


def clipped(**limits):
    gradients = [tf.constant([3.0, 4.0]), tf.IndexedSlices(tf.constant([[0.0, 12.0]]), tf.constant([1]), [3, 2])]
    return [
        np.asarray(getattr(gradient, "values", gradient)).ravel().tolist()
        for gradient in LocalClipping(**limits).clipped(gradients)
    ]


def test_nothing_by_default():
    assert clipped() == [[3, 4], [0, 12]]


def test_gradients_are_clipped_by_norm_global_norm_and_value():
    np.testing.assert_allclose(clipped(norm=1.0), [[0.6, 0.8], [0, 1]], rtol=1e-6)
    np.testing.assert_allclose(clipped(global_norm=6.5), [[1.5, 2], [0, 6]], rtol=1e-6)
    assert clipped(value=3.5) == [[3, 3.5], [0, 3.5]]
    np.testing.assert_allclose(clipped(norm=1.0, value=0.7), [[0.6, 0.7], [0, 0.7]], rtol=1e-6)


def test_a_limit_must_be_positive():
    with pytest.raises(ValueError, match="got local_clip_value=0"):
        LocalClipping(value=0)
