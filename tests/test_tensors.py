import numpy as np
import pytest
import tensorflow as tf

from tfdist.tensors import call_site, to_tensor, unnumbered


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, bool])
@pytest.mark.parametrize("writeable", [True, False])
def test_arrays_become_tensors(dtype, writeable):
    aligned = np.zeros(1 << 16, np.uint8)
    array = aligned[-aligned.ctypes.data % 64 :][: 64 * np.dtype(dtype).itemsize].view(dtype)
    array[::3] = 1
    array.flags.writeable = writeable
    np.testing.assert_array_equal(to_tensor(array).numpy(), array)


def sites_of(function, *signature):
    """The names that are given while a function is traced."""
    names = []

    def traced(*args):
        function(names, *args)
        return tf.constant(0)

    traced.__name__ = "traced"
    tf.function(traced, autograph=False).get_concrete_function(*signature)
    return names


def body(names, *args):
    names.append(call_site("sum"))
    tf.cond(tf.constant(True), lambda: _note(names), lambda: _note(names))
    tf.cond(tf.constant(True), lambda: _note(names), lambda: _note(names))
    names.append(call_site("sum"))
    names.append(call_site("gather"))


def _note(names, members=()):
    names.append(call_site("sum", members))
    return tf.constant(1)


def test_each_call_site_has_a_unique_name():
    names = sites_of(body)
    assert len(names) == len(set(names)) == 7


def test_names_do_not_change_when_a_function_is_traced_again_with_other_shapes():
    first = sites_of(body, tf.TensorSpec([32, 4]))
    again = sites_of(body, tf.TensorSpec([7, 4]))
    assert first == again


def test_nested_functions_have_stable_distinct_names():
    def outer(names):
        inner = tf.function(lambda: _note(names), autograph=False)
        inner()
        names.append(call_site("sum"))

    assert len(set(sites_of(outer))) == 2
    assert sites_of(outer) == sites_of(outer)


def test_call_sites_are_numbered_per_group():
    """Rank 1 is in two groups, and another member in one of them only."""

    def function(*groups):
        def trace(names):
            for members in groups:
                names.append(call_site("sum", members))
                tf.function(lambda members=members: _note(names, members), autograph=False)()

        return trace

    both = sites_of(function((0, 1), (2, 1)))
    assert both[:2] == sites_of(function((0, 1)))
    assert both[2:] == sites_of(function((2, 1)))


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
