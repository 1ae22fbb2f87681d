"""Tests that hold for every method: round trips of odd vectors, dtypes, damage, sizes, bias and variance."""

import ml_dtypes
import numpy as np
import pytest

import tfdist
from tests.compression.methods import ALL, BIASED, OWN_RESIDUAL, UNBIASED
from tfdist import compression as c
from tfdist import errors as c_errors
from tfdist.compression.feedback import with_feedback
from tfdist.compression.payload import HEADER_BYTES

rng = np.random.default_rng(0)


def normal(elements, dtype=np.float32):
    return (1e-3 * rng.standard_normal(elements)).astype(dtype)


def relative_error(decoded, vector):
    return float(np.linalg.norm(decoded - vector) / np.linalg.norm(vector))


def test_list_of_tested_methods_is_complete():
    """A new one belongs into a list of `tests/compression/methods.py`, with a number of its own."""
    wrappers = {c.ErrorFeedback, c.WithoutFeedback, c.Schedule, c.FewerWorkers}
    public = {member for member in vars(c).values() if isinstance(member, type) and issubclass(member, c.Method)}
    assert public - wrappers - {c.Method} == {type(method) for method in ALL}
    numbers = {type(method): method.number for method in ALL}
    assert len(set(numbers.values())) == len(numbers)


@pytest.mark.parametrize("method", ALL, ids=str)
@pytest.mark.parametrize("elements", [0, 1, 2, 63, 1000, 70_001])
def test_a_round_trip_reads_what_was_written(method, elements):
    vector = normal(elements)
    given = vector.copy()
    payload = method.encode(vector, c.State())
    decoded = method.decode(payload)
    np.testing.assert_array_equal(vector, given)
    assert (decoded.shape, decoded.dtype) == (vector.shape, np.float32)
    assert np.isfinite(decoded).all()
    np.testing.assert_array_equal(method.decode(payload), decoded)
    for combine in (np.add, np.subtract):
        out = np.ones_like(vector)
        method.decode(payload, out, combine)
        np.testing.assert_allclose(out, combine(np.ones_like(vector), decoded), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ALL, ids=str)
def test_zeros_stay_zeros(method):
    decoded = method.decode(method.encode(np.zeros(5000, np.float32), c.State()))
    np.testing.assert_array_equal(decoded, 0)


@pytest.mark.parametrize("method", ALL, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_vector_decodes_to_nan_and_keeps_state(method, bad):
    state = c.State()
    method.encode(normal(2000), state)
    kept = {name: array.copy() for name, array in state.arrays.items()}
    vector = normal(2000)
    vector[1234] = bad
    payload = method.encode(vector, state)
    assert payload.size == HEADER_BYTES
    assert np.isnan(method.decode(payload)).all()
    assert set(kept) == set(state.arrays)
    for name, array in kept.items():
        np.testing.assert_array_equal(state.arrays[name], array)


@pytest.mark.parametrize("method", [m for m in ALL if not isinstance(m, (c.Threshold, c.Strom, c.Float16))], ids=str)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_vectors_of_any_magnitude_decode_to_finite_numbers(method, scale):
    """Tests the methods that have no absolute range."""
    vector = (scale * rng.standard_normal(4096)).astype(np.float32)
    decoded = method.decode(method.encode(vector, c.State()))
    assert np.isfinite(decoded).all()
    if scale != 1.0 or method == c.SignSGD(scaled=False):
        return
    assert relative_error(decoded, vector) < 10


def test_float16_keeps_within_its_range():
    decoded = c.Float16().decode(c.Float16().encode(np.array([1e6, -1e6, 65504, 1e-9], np.float32)))
    np.testing.assert_array_equal(decoded, [65504, -65504, 65504, 0])


@pytest.mark.parametrize("method", ALL, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_half_and_double_precision_vectors_are_encoded(method, dtype):
    vector = normal(3000, dtype)
    payload = method.encode(vector, c.State())
    decoded = method.decode(payload)
    assert decoded.dtype == (np.float64 if dtype == np.float64 else np.float32)
    reference = method.decode(method.encode(vector.astype(np.float32), c.State()))
    if dtype != np.float64:
        np.testing.assert_array_equal(decoded, reference)
    elif method not in OWN_RESIDUAL:
        assert relative_error(decoded, vector.astype(np.float64)) < 10


@pytest.mark.parametrize("method", ALL, ids=str)
def test_damage_is_an_error(method):
    payload = method.encode(normal(3000), c.State())
    for cut in (0, 10, HEADER_BYTES, payload.size - 1):
        with pytest.raises(tfdist.PayloadError):
            method.decode(payload[:cut])
    with pytest.raises(tfdist.PayloadError):
        method.decode(np.append(payload, np.uint8(0)))
    for place in {0, 2, 3, 4, 5, 9, 17, HEADER_BYTES, payload.size // 2, payload.size - 1}:
        damaged = payload.copy()
        damaged[place] ^= 0x10
        with pytest.raises(tfdist.PayloadError):
            method.decode(damaged)
    with pytest.raises(tfdist.PayloadError, match="a vector of 3000 elements; expected 2999"):
        method.decode(payload, np.empty(2999, np.float32))


def test_another_methods_payload_is_an_error():
    with pytest.raises(tfdist.PayloadError, match="made by method number 4; expected 1"):
        c.Float16().decode(c.Int8().encode(normal(10)))


def test_method_numbers_are_different():
    numbers = {}
    for method in ALL:
        assert numbers.setdefault(method.number, type(method)) is type(method)


@pytest.mark.parametrize("method", [m for m in ALL if not isinstance(m, c.AtomoSVD)], ids=str)
def test_the_expected_ratio_is_what_comes_out(method):
    """But of AtomoSVD, whose is random; see test_atomo."""
    vector = np.random.default_rng(0).standard_normal(250_000).astype(np.float32)
    if isinstance(method, c.Threshold):
        method = c.Threshold(2.576)  # 1 %, as its estimate is of
    if method == c.Strom(tau=1e-3):
        method = c.Strom(tau=3.23)  # 1 of 800
    state = c.State(shape=(500, 500))
    method.encode(vector, state)
    state.step = 100  # after any warm-up
    assert vector.nbytes / method.encode(vector, state).size == pytest.approx(method.expected_ratio(250_000), rel=0.15)


@pytest.mark.parametrize(
    ("method", "least"),
    [
        (c.Float16(), 1.99), (c.BFloat16(), 1.99), (c.Float8("e4m3"), 3.99), (c.Float8("e5m2"), 3.99),
        (c.Int8(), 3.9), (c.OneBit(), 30), (c.SignSGD(), 30), (c.TopK(0.01), 60), (c.Strom(tau=3.23), 200),
    ],
    ids=str,
)  # fmt: skip
def test_compression_ratio_reaches_the_minimum(method, least):
    vector = rng.standard_normal(1_000_000).astype(np.float32)
    assert vector.nbytes / method.encode(vector, c.State()).size >= least


DRAWS = 2000


@pytest.mark.parametrize("method", UNBIASED, ids=str)
def test_the_mean_of_many_is_the_vector(method):
    """With 99.99 % confidence for each method: the deviations of 64 means are normal, χ² of 64 of them is below 126."""
    random = np.random.default_rng(5)  # magnitudes for which no outcome is rare: the means of rare ones are not normal
    vector = np.append(random.uniform(3e-4, 1e-3, 62) * random.choice([-1, 1], 62), [0.0, 5e-3]).astype(np.float32)
    state = c.State(shape=(8, 8))
    total, squares, differing = np.zeros(64), np.zeros(64), np.zeros(64)
    first = method.decode(method.encode(vector, state))
    for step in range(DRAWS):
        state.step = step
        decoded = method.decode(method.encode(vector, state)).astype(np.float64)
        differing += decoded != first
        total += decoded
        squares += (decoded - vector) ** 2
    mean_error = (total / DRAWS - vector) ** 2
    variance = squares / DRAWS
    where = differing > 0.01 * DRAWS
    chi_squared = (mean_error[where] / (variance[where] / DRAWS)).sum()
    assert chi_squared < 126
    # Elsewhere an outcome is certain, but for what rounding makes of it once in many times.
    assert np.sqrt(mean_error[~where]).max(initial=0) < 1e-3 * float(vector.max())
    bound = method.variance(64)
    if bound:
        assert squares.sum() / DRAWS <= 1.1 * bound * float((vector.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("method", ALL, ids=str)
def test_only_biased_methods_get_feedback(method):
    expected = method in BIASED
    assert isinstance(with_feedback(method), c.ErrorFeedback) == expected


@pytest.mark.parametrize("method", [m for m in ALL if m.linear], ids=str)
def test_linear_methods_add_up(method):
    """The sum of all ranks' rounds decodes to the sum of their decoded vectors."""
    vectors = [normal(2400) for _ in range(3)]
    states = [c.State("x", rank, 3, shape=(40, 60)) for rank in range(3)]
    running = [method.rounds(vector, state) for vector, state in zip(vectors, states, strict=True)]
    given = [next(rounds) for rounds in running]
    bodies = []
    while not bodies:
        total = np.sum(given, axis=0)
        given = []
        for rounds in running:
            try:
                given.append(rounds.send(total))
            except StopIteration as stop:
                bodies.append(stop.value)
    totals, local_bodies = zip(*bodies, strict=True)
    for body in totals:
        np.testing.assert_array_equal(body, totals[0])
    decoded, parts = np.empty(2400, np.float32), np.zeros(2400, np.float32)
    method.unpack(totals[0], decoded)
    for local_body in local_bodies:
        method.unpack(local_body, parts, np.add)
    np.testing.assert_allclose(decoded, parts, atol=1e-5 * np.abs(parts).max())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: c.TopK(0.0), "above 0 and at most 1; got 0.0"),
        (lambda: c.RandomK(2), "above 0 and at most 1; got 2"),
        (lambda: c.Atomo(-1), "above 0"),
        (lambda: c.Threshold(0.0), "tau must be above 0"),
        (lambda: c.Strom(), "needs tau, or density .*; got neither"),
        (lambda: c.Strom(tau=0.1, density=0.1), "got tau=0.1 and density=0.1"),
        (lambda: c.Strom(tau=-1.0), "tau must be above 0"),
        (lambda: c.Strom(density=0.0), "density must be a fraction"),
        (lambda: c.QSGD(levels=0), "between 1 and 127; got 0"),
        (lambda: c.Int8(block=0), "block must be at least 1"),
        (lambda: c.TernGrad(clip=0.0), "clip must be above 0, or None; got 0.0"),
        (lambda: c.Float8("e3m4"), "'e4m3' or 'e5m2'; got 'e3m4'"),
        (lambda: c.PowerSGD(0), "rank must be at least 1"),
        (lambda: c.AtomoSVD(0), "rank must be at least 1"),
        (lambda: c.DeepGradientCompression(momentum=1.0), "below 1; got 1.0"),
        (lambda: c.DeepGradientCompression(clip_norm=0.0), "clip_norm must be above 0"),
        (lambda: c.DeepGradientCompression(warmup_steps=-1), "at least 0"),
    ],
)
def test_arguments_out_of_range(make, words):
    with pytest.raises(ValueError, match=words):
        make()


class Halved(c.Method):
    """A custom method, which only encodes and decodes."""

    def __init__(self, by=2):
        self.by = by

    def pack(self, vector, state):
        return (vector / self.by).astype(np.float32).view(np.uint8)

    def unpack(self, body, out, combine=None):
        values = self.by * np.frombuffer(body.tobytes(), np.float32)
        out[...] = values if combine is None else combine(out, values)


def test_custom_method_encodes_and_decodes():
    method = Halved(4)
    assert repr(method) == repr(Halved(4)) == "Halved(by=4)"  # processes compare it
    assert method.expected_ratio(1000) == pytest.approx(1, rel=0.01)
    vector = normal(100)
    np.testing.assert_allclose(method.decode(method.encode(vector)), vector, rtol=1e-6)


def test_payload_of_another_dtype_raises():
    payload = c.TopK(0.5).encode(normal(100).astype(np.float64))
    with pytest.raises(c_errors.PayloadError, match="float64; expected float32, as on this rank"):
        c.TopK(0.5).decode(payload, np.empty(100, np.float32))
