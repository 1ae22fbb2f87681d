import numpy as np
import pytest

from tfdist import compression as c
from tfdist.compression.atomo import probabilities

rng = np.random.default_rng(1)


def test_atomos_probabilities_are_the_closed_form():
    # All below 1: proportional. Then one, and two, that are certain.
    np.testing.assert_allclose(probabilities(np.array([1.0, 2, 3, 4]), 2), [0.2, 0.4, 0.6, 0.8])
    np.testing.assert_allclose(probabilities(np.array([1.0, 1, 1, 9]), 2), [1 / 3, 1 / 3, 1 / 3, 1])
    np.testing.assert_allclose(probabilities(np.array([1.0, 3, 10, 20]), 3), [0.25, 0.75, 1, 1])
    np.testing.assert_array_equal(probabilities(np.array([1.0, 0, 2]), 3), [1, 0, 1])
    np.testing.assert_array_equal(probabilities(np.zeros(3), 1), 0)


def test_atomos_variance_is_the_least():
    """Σλ²/p under Σp = s is smallest where p is proportional to |λ| until it reaches 1; no other p does better."""
    magnitudes = np.abs(rng.standard_normal(6))
    best = probabilities(magnitudes, 2.5)
    assert best.sum() == pytest.approx(2.5)
    least = (magnitudes**2 / best).sum()
    for _ in range(2000):
        other = best + 0.05 * rng.standard_normal(6)
        other += (2.5 - other.sum()) / 6
        if (other > 0).all() and (other <= 1).all():
            assert (magnitudes**2 / other).sum() >= least * (1 - 1e-9)


def test_atomo_svd_sends_rank_triples_on_average():
    method, state = c.AtomoSVD(rank=3), c.State(shape=(30, 20))
    vector = rng.standard_normal(600).astype(np.float32)
    triples = []
    for step in range(300):
        state.step = step
        triples.append((method.encode(vector, state).size - 24 - 4) / (4 * 50))
    assert np.mean(triples) == pytest.approx(3, abs=5 * np.std(triples) / 300**0.5)


def test_atomo_sends_the_requested_share_on_average():
    method, state = c.Atomo(0.1), c.State()
    vector = rng.standard_normal(500).astype(np.float32)
    sent = []
    for state.step in range(300):
        sent.append(np.count_nonzero(method.decode(method.encode(vector, state))))
    assert np.mean(sent) == pytest.approx(50, abs=5 * np.std(sent) / 300**0.5)


def test_atomos_certain_entries_are_exact():
    """And others are sent as often too large as they are left out."""
    vector = np.array([0.5, 0.5, 100.0, -100.0], np.float32)
    chances = probabilities(np.abs(vector), 3)
    np.testing.assert_allclose(chances, [0.5, 0.5, 1, 1])
    state = c.State()
    for state.step in range(20):
        decoded = c.Atomo(0.75).decode(c.Atomo(0.75).encode(vector, state))
        np.testing.assert_array_equal(decoded[2:], vector[2:])
        assert set(decoded[:2]) <= {0.0, 1.0}


def test_atomo_svd_with_all_triples_is_the_matrix():
    state = c.State(shape=(4, 5, 6))
    vector = rng.standard_normal(120).astype(np.float32)
    decoded = c.AtomoSVD(rank=6).decode(c.AtomoSVD(rank=6).encode(vector, state))
    np.testing.assert_allclose(decoded, vector, atol=1e-5)


@pytest.mark.parametrize("magnitudes", [[1e-300, 2e-300], [1e300, 1e308], [0.0, 5.0]])
def test_probabilities_add_up_for_extreme_magnitudes(magnitudes):
    chances = probabilities(np.array(magnitudes), 1)
    assert chances.sum() == pytest.approx(1)
    assert (chances >= 0).all()
