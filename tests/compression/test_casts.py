import ml_dtypes
import numpy as np
import pytest

from tfdist import compression as c
from tfdist.compression.casts import round_stochastically
from tfdist.compression.payload import HEADER_BYTES

rng = np.random.default_rng(1)
FLOAT8 = pytest.mark.parametrize("method", [c.Float8("e4m3"), c.Float8("e5m2")], ids=str)


def test_casts_are_those_of_numpy():
    vector = np.concatenate([rng.standard_normal(5000), 1e-6 * rng.standard_normal(5000)]).astype(np.float32)
    for method in (c.Float16(), c.BFloat16()):
        decoded = method.decode(method.encode(vector))
        np.testing.assert_array_equal(decoded, vector.astype(method.dtype).astype(np.float32))


@pytest.mark.parametrize("method", [c.Float16(True), c.BFloat16(True), c.Float8("e4m3", True), c.Float8("e5m2", True)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_stochastic_rounding_takes_one_of_the_two_nearest(method, dtype):
    tiny = 2.0 ** np.arange(-26, 3)
    vector = np.concatenate([rng.standard_normal(2000), tiny, 1.3 * tiny, [0.0, 1.0, -1.5]]).astype(dtype)
    rounded = round_stochastically(vector, method.dtype, np.random.default_rng(0))
    np.testing.assert_array_equal(rounded, rounded.astype(method.dtype).astype(dtype))
    exact = vector.astype(method.dtype).astype(dtype) == vector
    np.testing.assert_array_equal(rounded[exact], vector[exact])
    above = np.abs(np.nextafter(vector.astype(method.dtype), method.dtype.type(100)).astype(dtype))
    spacing = np.abs(above - np.abs(vector.astype(method.dtype).astype(dtype)))
    assert (np.abs(rounded - vector) <= 2 * spacing).all()


@pytest.mark.parametrize("method", [c.Float16(True), c.Float8("e4m3", True), c.Float8("e5m2", True)], ids=str)
def test_subnormal_numbers_are_rounded_without_bias(method):
    """The mean of many draws, within 5 standard deviations, in units of the distance between subnormal numbers."""
    limits = ml_dtypes.finfo(method.dtype)
    spacing = 2.0 ** (limits.minexp - limits.nmant)
    parts = np.array([0.1, 0.5, 0.9, 1.3, 2.75, -0.25, -1.6])
    draws = np.repeat(parts, 10_000).astype(np.float32) * np.float32(spacing)
    rounded = round_stochastically(draws, method.dtype, np.random.default_rng(0)) / spacing
    means = rounded.reshape(len(parts), -1).mean(axis=1)
    np.testing.assert_allclose(means, parts, atol=5 * 0.5 / 100)


@pytest.mark.parametrize("elements", [7, (1 << 15) - 1, (1 << 18) + 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("method", [c.Float16(), c.BFloat16(), c.Float8("e4m3"), c.Float8("e5m2")], ids=str)
def test_long_vectors_are_cast_like_short_ones(method, dtype, elements):
    """Whatever makes the casts, TensorFlow or NumPy; the largest element is first, so that all parts have its scale."""
    vector = rng.standard_normal(elements).astype(dtype)
    vector[0] = 10
    decoded = method.decode(method.encode(vector))
    assert decoded.dtype == dtype
    for part in (slice(0, 5), slice(elements - 5, elements)):
        short = np.append(vector[0], vector[part])
        np.testing.assert_array_equal(decoded[part], method.decode(method.encode(short))[1:])


@FLOAT8
@pytest.mark.parametrize("largest", [1e-30, 0.1, 1.0, 448.0, 449.0, 1e30])
def test_float8_is_scaled_such_that_the_largest_element_is_within_its_range(method, largest):
    """By a power of two, so that what the type can hold is exact; and by as much as possible."""
    vector = np.array([largest, -largest / 2], np.float32)
    payload = method.encode(vector)
    decoded = method.decode(payload)
    np.testing.assert_allclose(decoded, vector, rtol=float(ml_dtypes.finfo(method.dtype).eps))
    code = payload[HEADER_BYTES + 4 :].view(method.dtype).astype(np.float32)
    most = float(ml_dtypes.finfo(method.dtype).max)
    assert most / 2 <= code[0] <= most


@FLOAT8
def test_float8_takes_a_byte_an_element_and_a_scale(method):
    assert method.encode(np.ones(1001, np.float32)).size == HEADER_BYTES + 4 + 1001 == method.payload_bytes(1001)


def test_bfloat16_has_the_range_of_float32():
    largest = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    vector = np.array([np.finfo(np.float32).max, largest, -largest, 1e-38], np.float32)
    decoded = c.BFloat16().decode(c.BFloat16().encode(vector))
    np.testing.assert_allclose(decoded, [largest, largest, -largest, 1e-38], rtol=2**-8)


@pytest.mark.parametrize("method", [c.Float16, c.BFloat16, c.Float8])
def test_stochastic_rounding_is_another_draw_in_each_step_and_on_each_rank(method):
    vector, made = rng.standard_normal(1000).astype(np.float32), method(stochastic=True)
    payloads = []
    for step, rank in ((0, 0), (1, 0), (0, 1), (0, 0)):
        state = c.State("x", rank, 2)
        state.step = step
        payloads.append(made.encode(vector, state).tobytes())
    assert len(set(payloads)) == 3
    assert payloads[0] == payloads[3]
    assert made.unbiased
    assert not method().unbiased
