import numpy as np
import pytest

from tests.sweeps import crossed
from tfdist import compression as c
from tfdist.compression import sparse
from tfdist.compression.state import State
from tfdist.errors import PayloadError

rng = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_body_holds_indices_signs_and_tau(dtype):
    """Indices, a bit for each, set where it is negative, and τ as a float32."""
    vector = np.zeros(20, dtype)
    vector[[1, 4, 5, 6, 7, 8, 10, 12, 19]] = [2, -2, 3, 1.5, 2, -9, 2, 2, -1.5]
    indices, rest = sparse.unpack(c.Strom(tau=1.5).pack(vector, State()), 20)
    assert indices.tolist() == [1, 4, 5, 6, 7, 8, 10, 12, 19]
    assert rest.tobytes() == bytes([0b01000100, 0b10000000]) + np.float32(1.5).tobytes()


@pytest.mark.parametrize("tau", [0.1, 1 / 3])
def test_element_of_exactly_tau_is_sent_in_double_precision(tau):
    """An element of exactly τ is sent, and all ranks decode the same τ."""
    vector = np.array([tau, -tau, tau * (1 - 1e-12)])
    decoded = c.Strom(tau=tau).decode(c.Strom(tau=tau).encode(vector))
    np.testing.assert_array_equal(decoded, np.float32(tau) * np.array([1, -1, 0]))


def test_density_takes_tau_from_the_smallest_sent_element():
    vector = np.array([0.5, -4, 0.25, 3, 0, -2], np.float32)
    decoded = c.Strom(density=0.5).decode(c.Strom(density=0.5).encode(vector))
    np.testing.assert_array_equal(decoded, [0, -2, 0, 2, 0, -2])


@pytest.mark.parametrize("density", [0.001, 0.01, 0.3, 1.0])
def test_share_of_sent_elements_equals_the_density(density):
    vector = rng.standard_normal(10_000).astype(np.float32)
    decoded = c.Strom(density=density).decode(c.Strom(density=density).encode(vector))
    assert np.count_nonzero(decoded) == round(10_000 * density)
    assert len(np.unique(np.abs(decoded[decoded != 0]))) == 1
    sent = np.flatnonzero(decoded)
    np.testing.assert_array_equal(np.sign(decoded[sent]), np.sign(vector[sent]))


def test_elements_of_one_size_are_not_all_sent():
    """More elements reach τ than are wanted."""
    decoded = c.Strom(density=0.1).decode(c.Strom(density=0.1).encode(np.ones(100, np.float32)))
    assert np.count_nonzero(decoded) == 10


@pytest.mark.parametrize("method", [c.Strom(tau=100.0), c.Strom(density=0.01)], ids=str)
def test_payload_without_elements_changes_nothing(method):
    vector = rng.standard_normal(50).astype(np.float32) if method.tau else np.zeros(50, np.float32)
    out = np.ones(50, np.float32)
    method.decode(method.encode(vector), out, np.add)
    np.testing.assert_array_equal(out, 1)


@pytest.mark.parametrize("change", [lambda body: body[:-1], lambda body: np.append(body, np.uint8(0))])
def test_body_of_wrong_length_raises(change):
    body = c.Strom(tau=1.0).pack(np.full(30, 2, np.float32), State())
    with pytest.raises(PayloadError, match="1 values of float32 were expected; got"):
        c.Strom(tau=1.0).unpack(change(body), np.empty(30, np.float32))


def test_strom_sends_tau_and_keeps_the_rest():
    method = c.ErrorFeedback(c.Strom(tau=1.0))
    state = c.State()
    decoded = method.decode(method.encode(np.array([2.5, -0.4, -1.0], np.float32), state))
    np.testing.assert_array_equal(decoded, [1, 0, -1])
    np.testing.assert_allclose(state.arrays["residual"], [1.5, -0.4, 0])
    decoded = method.decode(method.encode(np.array([0, -0.7, 0], np.float32), state))
    np.testing.assert_array_equal(decoded, [1, -1, 0])


@pytest.mark.parametrize(
    ("scales", "density", "seed"),
    crossed(["stationary", "shrinking", "growing", "jumping"], [1 / 20, 1 / 400], range(3)),
)
def test_strom_sends_the_share_that_was_asked_for(scales, density, seed):
    """With its residual, which after some steps has far more large elements than any gradient."""
    generator, elements, steps = np.random.default_rng(seed), 20_000, 300
    factor = {
        "stationary": lambda step: 1.0,
        "shrinking": lambda step: 0.99**step,
        "growing": lambda step: 1.02**step,
        "jumping": lambda step: 100.0 if step // 50 % 2 else 1.0,
    }[scales]
    method, state = c.ErrorFeedback(c.Strom(density=density)), c.State()
    drift, densities, norms = 0.1 * generator.standard_normal(elements), [], []
    for step in range(steps):
        gradient = factor(step) * (drift + generator.standard_normal(elements))
        decoded = method.decode(method.encode(gradient.astype(np.float32), state))
        densities.append(np.count_nonzero(decoded) / elements)
        norms.append(np.linalg.norm(state.arrays["residual"]))
    assert density / 1.3 <= min(densities) <= max(densities) <= 1.3 * density
    if scales == "stationary" and density == 1 / 20:  # the residual has an end, too
        assert max(norms[200:]) < 1.2 * max(norms[100:200])


def test_strom_sends_no_zeros():
    method = c.Strom(density=0.5)
    for vector in (np.zeros(10, np.float32), np.array([0, 3, 0, -1] + [0] * 10, np.float32)):
        decoded = method.decode(method.encode(vector))
        np.testing.assert_array_equal(decoded, np.sign(vector))
