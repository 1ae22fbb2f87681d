import numpy as np
import pytest

from tfdist.tensors import to_tensor, unnumbered


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, bool])
@pytest.mark.parametrize("writeable", [True, False])
def test_arrays_become_tensors(dtype, writeable):
    aligned = np.zeros(1 << 16, np.uint8)
    array = aligned[-aligned.ctypes.data % 64 :][: 64 * np.dtype(dtype).itemsize].view(dtype)
    array[::3] = 1
    array.flags.writeable = writeable
    np.testing.assert_array_equal(to_tensor(array).numpy(), array)


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
