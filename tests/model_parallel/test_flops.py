"""Counts are those that one derives by hand."""

import keras
import pytest
import tensorflow as tf

from tfdist.model_parallel.flops import UnknownShapeError, flops


def counted(function, *specs):
    return flops(tf.function(function).get_concrete_function(*specs).graph)


def spec(*shape, dtype=tf.float32):
    return tf.TensorSpec(shape, dtype)


PRODUCTS = {
    "matrices": (lambda a, b: tf.matmul(a, b), [spec(3, 4), spec(4, 5)], 2 * 3 * 4 * 5),
    "transposed": (lambda a, b: tf.matmul(a, b, transpose_a=True), [spec(4, 3), spec(4, 5)], 2 * 3 * 4 * 5),
    "batches": (lambda a, b: tf.matmul(a, b), [spec(7, 3, 4), spec(7, 4, 5)], 7 * 2 * 3 * 4 * 5),
    "einsum": (lambda a, b: tf.einsum("bij,bjk->bik", a, b), [spec(7, 3, 4), spec(7, 4, 5)], 7 * 2 * 3 * 4 * 5),
    "einsum of heads": (
        lambda a, b: tf.einsum("btd,dhk->bthk", a, b),
        [spec(2, 6, 8), spec(8, 2, 4)],
        2 * 2 * 6 * 8 * 8,
    ),
    "convolution": (
        lambda a, b: tf.nn.conv2d(a, b, 1, "SAME"),
        [spec(2, 8, 8, 3), spec(3, 3, 3, 16)],
        2 * 9 * 3 * 2 * 8 * 8 * 16,
    ),
    "groups": (
        lambda a, b: tf.nn.conv2d(a, b, 1, "SAME"),
        [spec(2, 8, 8, 4), spec(3, 3, 2, 16)],
        2 * 9 * 2 * 2 * 8 * 8 * 16,
    ),
    "depthwise": (
        lambda a, b: tf.nn.depthwise_conv2d(a, b, [1, 1, 1, 1], "SAME"),
        [spec(2, 8, 8, 4), spec(3, 3, 4, 2)],
        2 * 9 * 2 * 8 * 8 * 8,
    ),
    "transposed convolution": (
        lambda a, b: tf.nn.conv2d_transpose(a, b, [2, 8, 8, 5], 2),
        [spec(2, 4, 4, 3), spec(3, 3, 5, 3)],
        2 * 9 * 5 * 2 * 4 * 4 * 3,
    ),
    "elements": (lambda a: tf.exp(a) + a, [spec(3, 4)], 2 * 12),
    "reductions": (lambda a: tf.reduce_sum(a, 1), [spec(3, 4)], 12),
    "softmax": (tf.nn.softmax, [spec(3, 4)], 5 * 12),
    "pooling": (lambda a: tf.nn.max_pool2d(a, 2, 2, "VALID"), [spec(2, 8, 8, 3)], 4 * 2 * 4 * 4 * 3),
    "moves": (lambda a: tf.transpose(tf.reshape(a, (4, 3)))[:, 1:], [spec(3, 4)], 0),
    "integers": (lambda a: a * a, [spec(3, 4, dtype=tf.int32)], 0),
    "complex": (lambda a: a + a, [spec(3, 4, dtype=tf.complex64)], 12),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_flops_of_operations_equal_hand_counts(name):
    function, specs, expected = PRODUCTS[name]
    assert counted(function, *specs) == expected


def test_nested_functions_and_costlier_branch_are_counted():
    inner = tf.function(lambda a: tf.sin(a))

    def outer(a):
        return tf.cond(a[0, 0] > 0, lambda: inner(tf.cos(a)), lambda: a)

    assert counted(outer, spec(3, 4)) == 2 * 12, "the more costly branch"


def test_loops_count_by_their_trips():
    def looped(a):
        return tf.while_loop(lambda i, a: i < 7, lambda i, a: (i + 1, tf.sin(a)), (0, a), maximum_iterations=7)

    assert counted(looped, spec(3, 4)) == 7 * 12


@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU, keras.layers.SimpleRNN])
def test_a_recurrent_layer_counts_as_its_steps(layer):
    counts = []
    for unroll in (False, True):
        made = layer(16, unroll=unroll)
        made.build((2, 10, 8))
        counts.append(counted(made, spec(2, 10, 8)))
    assert counts[0] == pytest.approx(counts[1], rel=0.02)
    gates = {keras.layers.LSTM: 4, keras.layers.GRU: 3, keras.layers.SimpleRNN: 1}[layer]
    products = 10 * 2 * 2 * (8 + 16) * gates * 16
    assert products < counts[0] < 1.3 * products


def test_unknown_shapes_and_trip_counts_raise():
    with pytest.raises(UnknownShapeError, match="is known at run time only"):
        counted(lambda a: a + a, spec(None, 4))
    with pytest.raises(UnknownShapeError, match="how often the loop"):
        counted(lambda a: tf.while_loop(lambda a: a[0] < 3, lambda a: (a + 1,), (a,)), spec(4))
