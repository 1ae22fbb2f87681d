"""Packed tensors: what a host call gets and returns of them."""

import numpy as np
import pytest
import tensorflow as tf

from tfdist.engine import buckets
from tfdist.engine.host_calls import host_call
from tfdist.engine.packed_tensors import PackedTensors
from tfdist.tensors import to_array

LARGE = buckets.ALONE_BYTES // 4


def some():
    """Tensors of three dtypes, mixed; one is so large that it is alone."""
    ranges = [
        tf.range(6, dtype=tf.float32)[:, tf.newaxis],
        tf.constant(2.5, tf.float64),
        tf.range(LARGE, dtype=tf.float32),
        tf.zeros([0, 3], tf.float32),
        tf.cast(tf.reshape(tf.range(4), [2, 2]), tf.bfloat16),
        tf.constant(-1.0, tf.float32),
        tf.constant([7.0, 8.0], tf.float64),
        tf.constant(-0.5, tf.bfloat16),
    ]
    return [tf.identity(tensor) for tensor in ranges]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(*(to_array(tf.convert_to_tensor(value)) for value in (one, other)), strict=True)


@pytest.mark.parametrize("decorated", [tf.function, lambda function: function], ids=["in a graph", "eagerly"])
def test_a_host_call_gets_and_returns_few_tensors(decorated):
    tensors, calls = some(), []

    @decorated
    def doubled(*tensors):
        packing = PackedTensors(tensors)

        def on_host(*packed):
            calls.append(len(packed))
            return packing.pack_arrays([np.asarray(array + array) for array in packing.arrays(packed)])

        return packing.unpack(host_call(on_host, packing.pack(tensors), packing.specs, name="doubled"))

    assert_equal(doubled(*tensors), [tensor + tensor for tensor in tensors])
    assert calls == [4], "small float32, float64 and bfloat16, and the large one"


def test_arrays_are_views_and_packed_arrays_are_copies():
    packing = PackedTensors(some())
    packed = packing.pack(some())
    arrays = packing.arrays([np.asarray(whole) for whole in packed])
    assert_equal(arrays, some())
    wholes = [np.asarray(whole) for whole in packed]
    assert all(any(np.shares_memory(array, whole) for whole in wholes) for array in arrays if array.size)
    given = [np.array(array) for array in arrays]
    copies = packing.pack_arrays(given)
    for array in given:
        array[...] = 0
    assert_equal(packing.unpack(list(map(tf.constant, copies))), some())


def test_nothing_is_packed_to_nothing():
    packing = PackedTensors([])
    assert (packing.specs, packing.pack([]), packing.unpack([]), packing.arrays([])) == ([], [], [], [])
