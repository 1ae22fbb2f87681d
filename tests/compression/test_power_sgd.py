import numpy as np
import pytest

from tests.compression.test_reduction import World
from tfdist import compression as c

rng = np.random.default_rng(1)


def test_power_sgd_finds_a_matrix_of_its_rank():
    vector = (rng.standard_normal((50, 3)) @ rng.standard_normal((3, 40))).astype(np.float32).reshape(-1)
    method, state = c.PowerSGD(rank=3), c.State(shape=(50, 40))
    for _ in range(3):
        decoded = method.decode(method.encode(vector, state))
    np.testing.assert_allclose(decoded, vector, atol=1e-4 * np.abs(vector).max())


def test_power_sgd_goes_on_where_it_ended():
    left, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    right, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    vector = (left * 0.8 ** np.arange(60) @ right.T).astype(np.float32).reshape(-1)
    method, state = c.PowerSGD(rank=4), c.State(shape=(60, 60))
    errors = [float(np.linalg.norm(method.decode(method.encode(vector, state)) - vector)) for _ in range(20)]
    best = float(np.linalg.norm(0.8 ** np.arange(4, 60)))
    assert errors[-1] < 1.01 * best < errors[0]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_find_the_low_rank_of_their_sum_not_of_their_own(size):
    """The sum has one direction; each rank's own gradient has as many as it can."""
    world = World(c.WithoutFeedback(c.PowerSGD(rank=1)), size, (20, 30))
    expected = np.outer(rng.standard_normal(20), rng.standard_normal(30)).reshape(-1)
    for _ in range(3):
        vectors = [rng.standard_normal(600) for _ in range(size - 1)]
        vectors.append(expected - np.sum(vectors, axis=0))
        total = world.step([vector.astype(np.float32) for vector in vectors])
    np.testing.assert_allclose(total, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("shape", [(3, 40), (40, 3), (120,), (1, 120), (2, 3, 20)])
def test_matrix_of_at_most_the_given_rank_is_exact(shape):
    """A tensor is a matrix of its last axis by all others."""
    state, method = c.State(shape=shape), c.PowerSGD(rank=10)
    vector = rng.standard_normal(120).astype(np.float32)
    np.testing.assert_allclose(method.decode(method.encode(vector, state)), vector, atol=1e-5)


def test_gradient_after_zeros_is_decoded_exactly():
    """The direction of nothing is none to go on with."""
    state, method = c.State(shape=(10, 12)), c.PowerSGD(rank=1)
    assert not method.decode(method.encode(np.zeros(120, np.float32), state)).any()
    vector = np.outer(np.arange(10), np.arange(12)).astype(np.float32).reshape(-1)
    np.testing.assert_allclose(method.decode(method.encode(vector, state)), vector, atol=1e-3)


def test_payload_size_grows_with_sides_and_rank():
    sizes = [c.PowerSGD(rank).encode(np.ones(10_000, np.float32), c.State(shape=(100, 100))).size for rank in (1, 2)]
    assert sizes[1] - sizes[0] == 4 * (100 + 100)
    assert sizes[0] == pytest.approx(c.PowerSGD(1).payload_bytes(10_000), abs=8)
