"""What is particular to single methods, against their papers' formulas."""

import numpy as np
import pytest

from tests.compression.test_reduction import World
from tfdist import compression as c
from tfdist.compression import sparse
from tfdist.compression.atomo import probabilities
from tfdist.compression.casts import round_stochastically
from tfdist.compression.feedback import with_feedback

rng = np.random.default_rng(1)


def test_casts_are_those_of_numpy():
    vector = np.concatenate([rng.standard_normal(5000), 1e-6 * rng.standard_normal(5000)]).astype(np.float32)
    for method in (c.Float16(), c.BFloat16()):
        found = method.decode(method.encode(vector))
        np.testing.assert_array_equal(found, vector.astype(method.dtype).astype(np.float32))


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


def test_one_bit_decodes_to_the_column_means():
    vector = rng.standard_normal(3 * 1500).astype(np.float32)
    found = c.OneBit().decode(c.OneBit().encode(vector, c.State(shape=(3, 1500)))).reshape(3, 1500)
    for row, column in zip(found, vector.reshape(3, 1500), strict=True):
        np.testing.assert_allclose(row[column >= 0], column[column >= 0].mean(), rtol=1e-4)
        np.testing.assert_allclose(row[column < 0], column[column < 0].mean(), rtol=1e-4)


def test_sign_sgd_counts_votes():
    method = c.SignSGD()
    vectors = [np.array(v, np.float32) for v in ([1, -1, 2, -5], [2, -2, -2, 5], [-9, -1, 1, 5])]
    state = c.State()
    merged = method.merge([method.encode(v) for v in vectors], 4, np.dtype(np.float32), state)
    scale = sum(np.abs(v).mean() for v in vectors)
    np.testing.assert_allclose(method.decode(merged), scale * np.array([1, -1, 1, 1]), rtol=1e-6)
    paper = c.SignSGD(scaled=False)
    merged = paper.merge([paper.encode(v) for v in vectors], 4, np.dtype(np.float32), state)
    np.testing.assert_array_equal(paper.decode(merged), [1, -1, 1, 1])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_sign_sgd_counts_the_votes_of_any_number(ranks):
    method, elements = c.SignSGD(scaled=False), 40_003
    vectors = rng.standard_normal((ranks, elements)).astype(np.float32)
    payloads = [method.encode(vector) for vector in vectors]
    found = method.decode(method.merge(payloads, elements, np.dtype(np.float32), c.State()))
    votes = np.sign(vectors).sum(0)
    np.testing.assert_array_equal(found[votes != 0], np.sign(votes)[votes != 0])
    by_turns = np.where(np.arange(elements) % 2, -1, 1)
    np.testing.assert_array_equal(found[votes == 0], by_turns[votes == 0])


def test_sign_sgd_breaks_ties_by_turns():
    method = c.SignSGD(scaled=False)
    payloads = [method.encode(np.full(6, sign, np.float32)) for sign in (1, -1)]
    state, totals = c.State(), []
    for state.step in range(2):
        totals.append(method.decode(method.merge(payloads, 6, np.dtype(np.float32), state)))
    np.testing.assert_array_equal(np.abs(totals), 1)
    np.testing.assert_array_equal(totals[0], -totals[1])


@pytest.mark.parametrize("elements", [10, 5000, 600_000])
@pytest.mark.parametrize("values", ["normal", "equal", "few", "heavy"])
def test_the_largest_are_exactly_the_largest(elements, values):
    vector = {
        "normal": lambda: rng.standard_normal(elements),
        "equal": lambda: np.ones(elements),
        "few": lambda: (rng.random(elements) < 0.001).astype(float),
        "heavy": lambda: rng.standard_cauchy(elements),
    }[values]().astype(np.float32)
    for count in (1, elements // 100, elements // 3, elements):
        found = sparse.largest(vector, count)
        assert (np.diff(found) > 0).all()
        magnitudes = np.sort(np.abs(vector))[::-1][:count]
        magnitudes = magnitudes[magnitudes > 0]
        np.testing.assert_array_equal(np.sort(np.abs(vector[found]))[::-1], magnitudes)


def test_threshold_sends_what_reaches_it():
    vector = np.array([0.5, -1.0, 0.99, 2.0], np.float32)
    np.testing.assert_array_equal(c.Threshold(1.0).decode(c.Threshold(1.0).encode(vector)), [0, -1, 0, 2])


def test_random_k_sends_one_of_each_stretch():
    vector = np.ones(1003, np.float32)
    found = c.RandomK(0.1).decode(c.RandomK(0.1).encode(vector, c.State("x", 0, 4)))
    assert np.count_nonzero(found) == 100
    assert found.sum() == 1003
    again = c.RandomK(0.1).decode(c.RandomK(0.1).encode(vector, c.State("x", 3, 4)))
    np.testing.assert_array_equal(again, found)  # on another rank


def test_deep_gradient_compression_is_the_papers_recursion():
    method = c.DeepGradientCompression(ratio=0.25, momentum=0.5)
    state, velocity, unsent = c.State(), np.zeros(8), np.zeros(8)
    for _ in range(5):
        gradient = rng.standard_normal(8).astype(np.float32)
        velocity = 0.5 * velocity + gradient
        unsent = unsent + velocity
        chosen = np.argsort(-np.abs(unsent))[:2]
        expected = np.zeros(8)
        expected[chosen] = unsent[chosen]
        velocity[chosen] = unsent[chosen] = 0
        np.testing.assert_allclose(method.decode(method.encode(gradient, state)), expected, rtol=1e-5)


def test_deep_gradient_compression_warms_up_and_clips():
    method = c.DeepGradientCompression(ratio=0.001, warmup_steps=10)
    assert [method.ratio_at(step) for step in (0, 9, 10, 20, 30, 40, 1000)] == [
        0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001, 0.001,
    ]  # fmt: skip
    clipping = c.DeepGradientCompression(ratio=1.0, momentum=0.0, clip_norm=1.0)
    found = clipping.decode(clipping.encode(np.array([30.0, 40.0], np.float32), c.State(size=4)))
    np.testing.assert_allclose(found, [0.3, 0.4], rtol=1e-6)


def test_strom_sends_tau_and_keeps_the_rest():
    method = c.ErrorFeedback(c.Strom(tau=1.0))
    state = c.State()
    found = method.decode(method.encode(np.array([2.5, -0.4, -1.0], np.float32), state))
    np.testing.assert_array_equal(found, [1, 0, -1])
    np.testing.assert_allclose(state.arrays["residual"], [1.5, -0.4, 0])
    found = method.decode(method.encode(np.array([0, -0.7, 0], np.float32), state))
    np.testing.assert_array_equal(found, [1, -1, 0])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("density", [1 / 20, 1 / 400])
@pytest.mark.parametrize("scales", ["stationary", "shrinking", "growing", "jumping"])
def test_strom_sends_the_share_that_was_asked_for(scales, density, seed):
    """With its residual, in which after some steps far more elements are large than in any gradient."""
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
        found = method.decode(method.encode(gradient.astype(np.float32), state))
        densities.append(np.count_nonzero(found) / elements)
        norms.append(np.linalg.norm(state.arrays["residual"]))
    assert density / 1.3 <= min(densities) <= max(densities) <= 1.3 * density
    if scales == "stationary" and density == 1 / 20:  # the residual has an end, too
        assert max(norms[200:]) < 1.2 * max(norms[100:200])


def test_strom_sends_nothing_of_zeros_and_all_there_is_of_few():
    method = c.Strom(density=0.5)
    for vector in (np.zeros(10, np.float32), np.array([0, 3, 0, -1] + [0] * 10, np.float32)):
        found = method.decode(method.encode(vector))
        np.testing.assert_array_equal(found, np.sign(vector))


def test_tern_grad_clips_at_so_many_standard_deviations():
    vector = rng.standard_normal(4000).astype(np.float32)
    vector[7] = 100.0
    limit = 2.5 * float(np.sqrt(np.mean(vector.astype(np.float64) ** 2)))
    state, total = c.State(), np.zeros(4000)
    method = c.TernGrad(block=1000)
    for step in range(300):
        state.step = step
        found = method.decode(method.encode(vector, state))
        scalers = np.abs(found).reshape(4, 1000).max(1)
        np.testing.assert_allclose(scalers[0], limit, rtol=1e-5)
        assert (np.isin(np.abs(found).reshape(4, 1000), [0, *scalers])).all()
        total += found / 300
    expected = np.clip(vector, -limit, limit)
    assert total[7] == pytest.approx(limit, rel=1e-5)
    assert abs((total - expected) @ expected) < 0.02 * (expected @ expected)
    unclipped = c.TernGrad(block=1000, clip=None)
    assert np.abs(unclipped.decode(unclipped.encode(vector, state))).max() == 100.0
    assert not method.unbiased
    assert unclipped.unbiased
    assert with_feedback(method) is method  # as in the paper


def test_tern_grads_ranks_share_their_scalers():
    """So that a sum has 2 N + 1 values, in each block; and a rank without a number leaves the others' alone."""
    vectors = [scale * rng.standard_normal(2000).astype(np.float32) for scale in (1, 3, 0.1)]
    world = World(c.TernGrad(block=500, clip=None), 3, (2000,))
    scalers = np.abs(vectors).max(0).reshape(4, 500).max(1)
    total = world.step(vectors).reshape(4, 500) / scalers[:, np.newaxis]
    np.testing.assert_allclose(total, np.rint(total), atol=1e-6)
    assert np.abs(total).max() <= 3.001
    assert all(state.scalers is None for state in world.states)
    clipped = World(c.TernGrad(block=2000), 3, (2000,)).step(vectors)
    found = np.abs(clipped)[clipped != 0].min()
    assert found == pytest.approx(2.5 * max(np.sqrt(np.mean(vector**2)) for vector in vectors), rel=1e-5)


def test_tern_grad_with_feedback():
    """Around random levels only a share is sent, so that the residual does not grow; also of what was clipped."""
    world = World(c.ErrorFeedback(c.TernGrad(block=500)), 2, (2000,))
    norms = []
    for _ in range(200):
        world.step([rng.standard_normal(2000).astype(np.float32) for _ in range(2)])
        norms.append(np.linalg.norm(world.residuals()))
    assert max(norms[100:]) < 1.5 * max(norms[:100])


def test_qsgds_variance_is_within_the_papers_bound():
    for levels, block in ((1, 512), (7, 512), (127, 64)):
        method, state = c.QSGD(levels, block), c.State()
        vector = rng.standard_normal(20 * block).astype(np.float32)
        squares = 0.0
        for step in range(50):
            state.step = step
            squares += float(((method.decode(method.encode(vector, state)) - vector) ** 2).sum()) / 50
        bound = min(block / levels**2, block**0.5 / levels)
        assert method.variance(vector.size) == bound
        assert squares <= 1.02 * bound * float((vector**2).sum())


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


def test_atomo_svd_sends_so_many_triples_on_average():
    method, state = c.AtomoSVD(rank=3), c.State(shape=(30, 20))
    vector = rng.standard_normal(600).astype(np.float32)
    triples = []
    for step in range(300):
        state.step = step
        triples.append((method.encode(vector, state).size - 24 - 4) / (4 * 50))
    assert np.mean(triples) == pytest.approx(3, abs=5 * np.std(triples) / 300**0.5)


def test_power_sgd_finds_a_matrix_of_its_rank():
    vector = (rng.standard_normal((50, 3)) @ rng.standard_normal((3, 40))).astype(np.float32).reshape(-1)
    method, state = c.PowerSGD(rank=3), c.State(shape=(50, 40))
    for _ in range(3):
        found = method.decode(method.encode(vector, state))
    np.testing.assert_allclose(found, vector, atol=1e-4 * np.abs(vector).max())


def test_power_sgd_goes_on_where_it_ended():
    left, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    right, _ = np.linalg.qr(rng.standard_normal((60, 60)))
    vector = (left * 0.8 ** np.arange(60) @ right.T).astype(np.float32).reshape(-1)
    method, state = c.PowerSGD(rank=4), c.State(shape=(60, 60))
    errors = [float(np.linalg.norm(method.decode(method.encode(vector, state)) - vector)) for _ in range(20)]
    best = float(np.linalg.norm(0.8 ** np.arange(4, 60)))
    assert errors[-1] < 1.01 * best < errors[0]
