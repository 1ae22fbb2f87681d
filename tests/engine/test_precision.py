import numpy as np
import tensorflow as tf

from tfdist.engine.precision import narrowed, widened


def test_only_half_precision_is_widened():
    dtypes = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
    gradients = [tf.constant([1.5], dtype) for dtype in dtypes]
    wide = widened(gradients)
    assert [tensor.dtype for tensor in wide] == [tf.float32, tf.float32, tf.float32, tf.float64]
    assert wide[2] is gradients[2]
    assert [tensor.dtype for tensor in narrowed(wide, gradients)] == dtypes


def test_slices_keep_their_rows():
    slices = tf.IndexedSlices(tf.constant([[1.5]], tf.bfloat16), tf.constant([3]), tf.constant([9, 1]))
    (wide,) = widened([slices])
    (result,) = narrowed([wide], [slices])
    assert (wide.dtype, result.dtype) == (tf.float32, tf.bfloat16)
    np.testing.assert_array_equal(result.indices, [3])
    np.testing.assert_array_equal(tf.cast(result.values, tf.float32), [[1.5]])
