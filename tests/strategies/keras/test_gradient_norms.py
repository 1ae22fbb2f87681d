import numpy as np
import pytest
import tensorflow as tf

from tfdist.strategies.keras.gradient_norms import GradientNorms, Noise, squared_norm

GRADIENTS = np.random.default_rng(0).normal(1.0, 2.0, size=(12, 5))


def measured(parts, is_weighed, norms=None):
    """As replicas with these samples measure."""
    norms = norms or GradientNorms()
    count = sum(map(len, parts))
    total, sums = np.zeros(5), np.zeros(2)
    for part in parts:
        weight = len(part) / count
        mean = part.mean(axis=0) if len(part) else np.full(5, np.nan)  # a stand-in row's, which counts for nothing
        if is_weighed:
            given = mean * weight if weight else np.zeros(5)
            sums += norms.own([tf.constant(given)], tf.constant(weight, tf.float64), True).numpy()
            total += given
        else:
            term = norms.own([tf.constant(mean)], tf.constant(weight, tf.float64), False).numpy()
            sums += term * weight if weight else 0
            total += mean * weight if weight else 0
    norms.add([tf.constant(total)], tf.constant(sums), count)
    return norms


@pytest.mark.parametrize("is_weighed", [False, True])
def test_noise_is_estimated_from_unequal_shares(is_weighed):
    parts = [GRADIENTS[:2], GRADIENTS[2:9], GRADIENTS[9:9], GRADIENTS[9:]]
    noise = measured(parts, is_weighed).read()
    small = sum(len(part) / 12 * np.sum(part.mean(axis=0) ** 2) for part in parts if len(part))
    large = np.sum(GRADIENTS.mean(axis=0) ** 2)
    np.testing.assert_allclose([noise.variance, noise.signal], [(small - large) * 6, large - (small - large) / 2])
    assert noise.steps == 1


def test_estimates_are_without_bias():
    norms, generator = GradientNorms(), np.random.default_rng(1)
    for _ in range(400):
        drawn = generator.normal(0.5, 2.0, size=(12, 5))
        measured([drawn[:1], drawn[1:5], drawn[5:]], False, norms)
    noise = norms.read()
    np.testing.assert_allclose(noise.variance / noise.steps, 5 * 4.0, rtol=0.1)
    np.testing.assert_allclose(noise.signal / noise.steps, 5 * 0.25, rtol=0.3)


def test_single_share_and_infinite_gradients_are_ignored():
    norms = measured([GRADIENTS, GRADIENTS[:0]], False)
    assert norms.read() == Noise()
    broken = GRADIENTS.copy()
    broken[3, 2] = np.inf
    assert measured([broken[:6], broken[6:]], False, norms).read() == Noise()
    before = measured([GRADIENTS[:6], GRADIENTS[6:]], False, norms).read()
    assert before.steps == 1
    assert measured([GRADIENTS[:6], GRADIENTS[6:]], False, norms).read().since(before) == before


def test_rows_of_the_same_index_are_added():
    slices = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([7, 2, 7]), (9, 2))
    assert float(squared_norm([slices, tf.constant(2.0)])) == 6**2 + 8**2 + 3**2 + 4**2 + 4


def test_half_precision_does_not_overflow():
    assert float(squared_norm([tf.fill([100], tf.constant(1e3, tf.float16))])) == pytest.approx(1e8)
