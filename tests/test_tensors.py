import numpy as np
import pytest
import tensorflow as tf

from tfdist.tensors import map_values, to_array, to_tensor, unnumbered


def test_function_of_rows_leaves_them_at_their_indices():
    rows = map_values(lambda tensor: 2 * tensor, tf.IndexedSlices(tf.ones((2, 3)), tf.constant([4, 1]), (5, 3)))
    dense = np.zeros((5, 3))
    dense[[4, 1]] = 2
    np.testing.assert_array_equal(tf.convert_to_tensor(rows), dense)
    np.testing.assert_array_equal(map_values(lambda tensor: 2 * tensor, tf.ones(3)), np.full(3, 2))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, bool])
@pytest.mark.parametrize("writeable", [True, False])
def test_arrays_become_tensors(dtype, writeable):
    aligned = np.zeros(1 << 16, np.uint8)
    array = aligned[-aligned.ctypes.data % 64 :][: 64 * np.dtype(dtype).itemsize].view(dtype)
    array[::3] = 1
    array.flags.writeable = writeable
    np.testing.assert_array_equal(to_tensor(array).numpy(), array)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_become_arrays_and_tensors_again(dtype, shape):
    tensor = tf.cast(tf.ones(shape), dtype)
    array = to_array(tensor)
    assert isinstance(array, np.ndarray)
    assert (array.dtype, array.shape) == (tensor.dtype.as_numpy_dtype, shape)
    again = to_tensor(array)
    assert (again.dtype, again.shape) == (tensor.dtype, shape)
    np.testing.assert_array_equal(to_array(again), array)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sequential_1_dense_3_kernel_momentum", "sequential_dense_kernel_momentum"),
        ("sequential_1/dense_3/kernel", "sequential/dense/kernel"),
        ("__inference_step_12", "__inference_step"),
        ("conv2d/kernel", "conv2d/kernel"),
    ],
)
def test_unnumbered_removes_numbers_added_to_names(name, expected):
    assert unnumbered(name) == expected
