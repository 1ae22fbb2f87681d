"""What every method inherits; what holds for each of them is in test_methods.py."""

import ml_dtypes
import numpy as np
import pytest

from tfdist import compression as c
from tfdist.compression import method as methods
from tfdist.compression.method import Method, Route

LARGEST = np.finfo(np.float32).max


class Plain(Method):
    """Writes float32 down as it is."""

    def __init__(self, route=Route.GATHER, unbiased=False, keeps_residual=False):
        self.route, self.unbiased, self.keeps_residual = route, unbiased, keeps_residual

    def pack(self, vector, state):
        assert vector.flags.c_contiguous
        state.step += 1
        return vector.astype(np.float32).view(np.uint8)

    def unpack(self, body, out, combine=None):
        methods.store(out, body.view(np.float32), combine)


def test_repr_lists_constructor_arguments():
    """Without an address: processes compare it."""
    assert repr(Plain(Route.EXCHANGE)) == f"Plain(route={Route.EXCHANGE!r}, unbiased=False, keeps_residual=False)"


@pytest.mark.parametrize("route", Route)
def test_only_all_reduce_methods_are_linear(route):
    assert Plain(route).linear == (route is Route.ALL_REDUCE)


@pytest.mark.parametrize(
    ("unbiased", "keeps_residual", "needs"),
    [(False, False, True), (True, False, False), (False, True, False), (True, True, False)],
)
def test_biased_methods_that_keep_no_residual_need_feedback(unbiased, keeps_residual, needs):
    assert Plain(unbiased=unbiased, keeps_residual=keeps_residual).needs_feedback is needs


def test_default_estimates_are_those_of_uncompressed_data():
    payload = Plain().encode(np.ones(1000, np.float32))
    assert payload.size == Plain().payload_bytes(1000)
    assert Plain().expected_ratio(1000) == 4000 / payload.size
    assert Plain().variance(1000) == 0
    assert Plain().granule((3, 4)) == 1
    assert Plain().scalers(np.ones(3), c.State()) is None


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_vectors_are_worked_on_as_float32_or_float64(dtype):
    """The working copy is also contiguous."""
    strided = np.arange(20).astype(dtype)[::2]
    working = methods.as_working(strided)
    assert working.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert working.flags.c_contiguous
    np.testing.assert_array_equal(working, np.arange(0, 20, 2))
    contiguous = np.ones(3, np.float32)
    assert methods.as_working(contiguous) is contiguous
    np.testing.assert_array_equal(Plain().decode(Plain().encode(strided)), np.arange(0, 20, 2))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_is_finite_detects_nan_and_infinity(bad, dtype):
    vector = np.ones(1001, dtype)
    assert methods.is_finite(vector)
    vector[500] = bad
    assert not methods.is_finite(vector)
    assert methods.is_finite(np.full(5, np.finfo(dtype).max)), "only their sum is not"
    assert methods.is_finite(vector[:0])


def test_saturate_takes_back_what_has_overflowed():
    vector = np.array([np.inf, -np.inf, 1.0], np.float32)
    assert methods.saturate(vector) is vector
    assert vector.tolist() == [LARGEST, -LARGEST, 1.0]
    assert np.isnan(methods.saturate(np.array([np.nan, np.inf], np.float32))).tolist() == [True, False]


@pytest.mark.parametrize("elements", [0, 1, 10, 11, 30])
def test_segments_make_up_the_whole(elements):
    segments = methods.segments(elements, 10)
    assert [place for segment in segments for place in range(elements)[segment]] == list(range(elements))
    assert all(0 < segment.stop - segment.start <= 10 for segment in segments)


@pytest.mark.parametrize(("combine", "stored"), [(None, 3), (np.add, 8), (np.subtract, 2)])
def test_store_assigns_or_combines(combine, stored):
    out = np.full(4, 5.0)
    methods.store(out[1:3], np.full(2, 3.0), combine)
    assert out.tolist() == [5, stored, stored, 5]


def test_empty_and_nan_vectors_are_not_packed():
    """And the state stays as it was."""
    state = c.State()
    for vector in (np.zeros(0, np.float32), np.array([1, np.nan], np.float32)):
        decoded = Plain().decode(Plain().encode(vector, state))
        assert decoded.shape == vector.shape
        assert np.isnan(decoded).all()
    assert state.step == 0


def test_encoding_zeros_does_not_change_the_state():
    state = c.State(shape=(2, 3))
    decoded = Plain().decode(Plain().encode_zeros(6, np.dtype(np.float64), state))
    assert (decoded.dtype, decoded.tolist()) == (np.float64, [0] * 6)
    assert state.step == 0


def test_overflow_in_merge_saturates():
    vectors = np.array([[1.0, 3e38], [2.0, 3e38], [4.0, -1.0]], np.float32)
    payloads = [Plain().encode(vector) for vector in vectors]
    with np.errstate(over="ignore"):
        merged = Plain().merge(payloads, 2, np.dtype(np.float32), c.State())
    assert Plain().decode(merged).tolist() == [7, LARGEST]


def test_rounds_of_a_non_linear_method_raise():
    with pytest.raises(TypeError, match=r"Plain\(.* has no rounds: its route must be Route\.ALL_REDUCE"):
        Plain().rounds(np.ones(3, np.float32), c.State())
