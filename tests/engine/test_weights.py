import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tfdist.engine.bridge import Bridge
from tfdist.engine.weights import weighted, weighted_in_graph
from tfdist.runtime import world

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("elements", [0, 1, 40_001])
def test_weighted_multiplies_in_double_precision(dtype, elements):
    vector = np.random.default_rng(0).standard_normal(elements).astype(dtype)
    vector.flags.writeable = False
    out = np.empty_like(vector)
    assert weighted(vector, 11 / 21, out) is out
    wide = np.complex128 if dtype == np.complex64 else np.float64  # the weight is not rounded to a half
    np.testing.assert_allclose(
        out.astype(wide), (vector.astype(wide) * (11 / 21)).astype(dtype).astype(wide), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_weight_gives_zeros_also_for_nan(dtype):
    vector = np.array([np.nan, np.inf, -np.inf, 1.0]).astype(dtype)
    assert not weighted(vector, 0.0, np.ones_like(vector)).any()


def test_weights_in_graphs_are_not_rounded_to_half_precision():
    given = tf.constant([1.0, 3.0, 5.0, np.nan], tf.bfloat16)
    expected = (np.array([1, 3, 5]) * (11 / 21)).astype(ml_dtypes.bfloat16)
    got = weighted_in_graph(given, tf.constant(11 / 21, tf.float64)).numpy()
    np.testing.assert_array_equal(got[:3].astype(float), expected.astype(float))
    np.testing.assert_array_equal(weighted_in_graph(given, tf.constant(0.0, tf.float64)).numpy().astype(float), 4 * [0])


def test_single_process_applies_its_weight():
    bridge = Bridge(world.current().group)
    given = tf.constant([1.0, np.nan])
    np.testing.assert_array_equal(bridge.all_reduce([given], weight=tf.constant(0.5, tf.float64))[0], [0.5, np.nan])
    np.testing.assert_array_equal(bridge.all_reduce([given], weight=tf.constant(0.0, tf.float64))[0], [0, 0])
