"""Sums of compressed vectors over simulated ranks, on every route."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from tests.collectives.simulation import simulate
from tests.compression.methods import ALL, BIASED, UNBIASED
from tests.sweeps import some, sweep
from tfdist import compression as c
from tfdist.compression import reduction
from tfdist.compression.feedback import with_feedback
from tfdist.compression.fusion import Traffic, fuse_reductions
from tfdist.compression.method import Route

rng = np.random.default_rng(4)


class World:
    """Ranks that add vectors, step after step."""

    def __init__(self, choice, size, shape):
        self.choice, self.size = choice, size
        self.states = [c.State("x", rank, size, shape=shape) for rank in range(size)]
        self.traffic = [Traffic() for _ in range(size)]

    def reductions(self, vectors, outs, choice=...):
        choice = self.choice if choice is ... else choice
        pieces = zip(vectors, outs, self.states, strict=True)
        return list(zip((reduction.begin(choice, *piece) for piece in pieces), self.traffic, strict=True))

    def step(self, vectors, choice=...):
        outs = [np.full_like(vector, 7) for vector in vectors]
        plans = [
            fuse_reductions([rank_reduction], lambda nbytes: "ring")
            for rank_reduction in self.reductions(vectors, outs, choice)
        ]
        _, self.communicators = simulate(self.size, lambda rank: plans[rank])
        for out in outs:
            np.testing.assert_array_equal(out.view(np.uint8), outs[0].view(np.uint8))
        return outs[0]

    def residuals(self):
        """The residuals of all ranks, including those of parts and their sums, in their places."""
        total = np.zeros(self.states[0].shape).reshape(-1)
        for rank, state in enumerate(self.states):
            total += state.arrays.get("residual", 0)
            for other, part in enumerate(state.parts):
                total[part] += state.part(f"for {other}").arrays.get("residual", 0)
                if other == rank:
                    total[part] += state.part("sum").arrays.get("residual", 0)
        return total


class ScatteredWorld(World):
    """Ranks each of which gets a part of the sum; the sum is that of all parts."""

    def __init__(self, choice, size, shape, bounds):
        super().__init__(choice, size, shape)
        self.parts = [slice(*pair) for pair in itertools.pairwise(bounds)]

    def reductions(self, vectors, outs, choice=...):
        choice = self.choice if choice is ... else choice
        pieces = zip(vectors, outs, self.states, strict=True)
        begun = (reduction.begin_scattered(choice, vector, self.parts, out, state) for vector, out, state in pieces)
        return list(zip(begun, self.traffic, strict=True))

    def step(self, vectors, choice=...):
        outs = [np.full_like(vectors[0][part], 7) for part in self.parts]
        begun = self.reductions(vectors, outs, choice)
        plans = [fuse_reductions([rank_reduction], pytest.fail) for rank_reduction in begun]
        _, self.communicators = simulate(self.size, lambda rank: plans[rank])
        return np.concatenate(outs)


def normals(size, elements, dtype=np.float32):
    return [(1e-3 * rng.standard_normal(elements)).astype(dtype) for _ in range(size)]


@pytest.mark.parametrize(
    ("method", "size"),
    [(pytest.param if size in (1, 3) else sweep)(m, size) for m in ALL for size in (1, 2, 3, 5, 8)],
    ids=str,
)
def test_all_ranks_get_the_same_sum(method, size):
    world = World(with_feedback(method), size, (50, 61))
    for _ in range(3):
        vectors = normals(size, 3050)
        total = world.step(vectors)
        expected = np.sum(vectors, axis=0)
        cosine = total @ expected / (np.linalg.norm(total) * np.linalg.norm(expected))
        assert 0.1 < cosine < 1 + 1e-5, cosine
    assert all(state.step == 3 for state in world.states)


@pytest.mark.parametrize("elements", [0, 1, 2, 7])
@pytest.mark.parametrize("method", ALL, ids=str)
def test_fewer_elements_than_ranks(method, elements):
    world = World(with_feedback(method), 4, (elements,))
    total = world.step(normals(4, elements))
    assert total.shape == (elements,)
    assert np.isfinite(total).all()


@pytest.mark.parametrize("method", [m for m in BIASED if not isinstance(m, c.SignSGD)], ids=str)
def test_sums_and_residuals_make_up_all_gradients(method):
    """The sums and the residuals of all ranks add up to the sum of the gradients, up to rounding."""
    world = World(with_feedback(method), 3, (40, 50))
    given, summed = np.zeros(2000), np.zeros(2000)
    for _ in range(12):
        vectors = normals(3, 2000)
        given += np.sum(vectors, axis=0)
        summed += world.step(vectors)
    np.testing.assert_allclose(summed + world.residuals(), given, atol=3e-6 * np.abs(given).max())


@pytest.mark.parametrize("method", some(UNBIASED, 4), ids=str)
def test_the_mean_of_sums_is_the_sum(method):
    """Within 5 standard deviations of the projection on the sum itself."""
    vectors = normals(3, 400)
    expected = np.sum(vectors, axis=0).astype(np.float64)
    world = World(method, 3, (20, 20))
    projections = [world.step(vectors) @ expected / (expected @ expected) for _ in range(400)]
    assert abs(np.mean(projections) - 1) < 5 * np.std(projections) / 400**0.5 + 1e-6


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("method", [c.Float16(), c.TopK(0.5), c.PowerSGD(2), None], ids=str)
def test_sum_keeps_half_and_double_precision(method, dtype):
    vectors = normals(2, 2000, dtype)
    total = World(method and with_feedback(method), 2, (40, 50)).step(vectors)
    assert total.dtype == dtype
    if not isinstance(method, c.PowerSGD | c.TopK):
        np.testing.assert_allclose(
            total.astype(float), np.sum([v.astype(float) for v in vectors], 0), atol=2e-5, rtol=1e-2
        )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_uncompressed_half_precision_is_sent_as_two_bytes(dtype):
    world = World(with_feedback(c.TopK(0.01)), 2, (40, 50))
    world.step(normals(2, 2000, dtype))
    world.step(normals(2, 2000, dtype), choice=None)
    assert world.communicators[0].bytes_sent == 2000 * 2


@pytest.mark.parametrize("method", ALL, ids=str)
def test_nan_of_one_rank_affects_one_step_only(method):
    world = World(with_feedback(method), 3, (50, 60))
    world.step(normals(3, 3000))
    vectors, residuals = normals(3, 3000), world.residuals()
    vectors[1][2999] = np.nan
    assert np.isnan(world.step(vectors)).all()
    if method.route is Route.ALL_REDUCE:  # on other routes the others' encodings count as sent
        np.testing.assert_allclose(world.residuals(), residuals, atol=1e-8)
    assert np.isfinite(world.step(normals(3, 3000))).all()


def test_residual_is_sent_when_compression_ends():
    world = World(with_feedback(c.TopK(0.01)), 2, (40, 50))
    first, second = normals(2, 2000), normals(2, 2000)
    summed = world.step(first) + world.step(second, choice=None)
    np.testing.assert_allclose(summed, np.sum(first + second, axis=0), atol=1e-8)
    assert not world.residuals().any()


def test_residuals_are_kept_when_methods_change():
    """Between routes that keep residuals in different places, and at the end to none."""
    choices = [c.Int8(), c.TopK(0.01), c.OneBit(), c.Int4(), c.PowerSGD(2), c.DeepGradientCompression(0.05, 0.0)]
    choices += [c.Int4(), c.RandomK(1.0), c.OneBit(), None]
    world = World(None, 3, (40, 50))
    given, summed = np.zeros(2000), np.zeros(2000)
    for choice in choices:
        vectors = normals(3, 2000)
        given += np.sum(vectors, axis=0)
        summed += world.step(vectors, choice=choice and with_feedback(choice))
        np.testing.assert_allclose(summed + world.residuals(), given, atol=1e-7)
        if isinstance(choice, c.RandomK):  # keeps no residual itself, and sends what others kept
            assert not world.residuals().any()
    assert not world.residuals().any()


def test_method_without_feedback_sends_earlier_residuals():
    world = World(with_feedback(c.TopK(0.01)), 2, (40, 50))
    first, second = normals(2, 2000), normals(2, 2000)
    summed = world.step(first) + world.step(second, choice=with_feedback(c.WithoutFeedback(c.TopK(1.0))))
    np.testing.assert_allclose(summed, np.sum(first + second, axis=0), atol=1e-8)
    assert not world.residuals().any()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", [c.Int4(), c.OneBit(), c.TopK(0.01)], ids=str)
def test_nan_does_not_change_residuals_of_its_rank(method, size):
    world = World(with_feedback(method), size, (50, 60))
    world.step(normals(size, 3000))
    before = {name: array.copy() for name, array in world.states[1].saved() if "residual" in name}
    vectors = normals(size, 3000)
    vectors[1][0] = np.nan
    world.step(vectors)
    after = dict(world.states[1].saved())
    assert before
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)


@pytest.mark.parametrize("method", [c.Float16(), c.Float8(), c.Int8(), c.Int4(), c.OneBit()], ids=str)
def test_two_ranks_do_not_round_their_sum(method):
    vectors = normals(2, 3000)
    total = World(c.WithoutFeedback(method), 2, (3000,)).step(vectors)
    decoded = [method.decode(method.encode(vector, c.State(shape=(3000,)))) for vector in vectors]
    np.testing.assert_allclose(total, decoded[0] + decoded[1], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("method", [c.SignSGD(), c.WithoutFeedback(c.SignSGD())], ids=str)
def test_two_ranks_vote(method):
    vectors = normals(2, 3000)
    world = World(with_feedback(method), 2, (3000,))
    total = world.step(vectors)
    for part in world.states[0].parts:
        magnitude = sum(np.abs(vector[part]).mean() for vector in vectors)
        np.testing.assert_allclose(np.abs(total[part]), magnitude, rtol=1e-5)
    assert world.states[0].parts


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", [m for m in ALL if m in BIASED], ids=str)
def test_sums_are_finite_after_an_overflowing_gradient(method, size):
    world = World(with_feedback(method), size, (50, 60))
    with np.errstate(all="ignore"):
        world.step([np.full(3000, 1e37, np.float32) for _ in range(size)])
    for _ in range(2):
        total = world.step(normals(size, 3000))
    assert np.isfinite(total).all()


@pytest.mark.parametrize("scaled", [True, False])
def test_ranks_with_zeros_do_not_vote(scaled):
    method = c.SignSGD(scaled=scaled)
    vectors = normals(4, 2000)
    for choice in (c.FewerWorkers(1, with_feedback(method)), with_feedback(method)):
        given = vectors if isinstance(choice, c.FewerWorkers) else [vectors[0], *np.zeros((3, 2000), np.float32)]
        np.testing.assert_array_equal(np.sign(World(choice, 4, (2000,)).step(given)), np.sign(vectors[0]))
    assert not World(with_feedback(method), 4, (2000,)).step([np.zeros(2000, np.float32)] * 4).any()


def test_fewer_workers_scales_the_sum_of_participants():
    world = World(c.FewerWorkers(2), 4, (2000,))
    vectors = normals(4, 2000)
    np.testing.assert_allclose(world.step(vectors), 2 * (vectors[0] + vectors[1]), rtol=1e-5, atol=1e-9)
    compressed = World(c.FewerWorkers(1, c.RandomK(1.0)), 4, (2000,))
    np.testing.assert_allclose(compressed.step(vectors), 4 * vectors[0], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("method", ALL, ids=str)
def test_bytes_are_counted(method):
    """This counts payloads; their lengths, 8 bytes each, are sent separately."""
    world = World(with_feedback(method), 4, (100, 200))
    world.step(normals(4, 20_000))
    for traffic, communicator in zip(world.traffic, world.communicators, strict=True):
        assert 0 <= communicator.bytes_sent - traffic.sent_bytes <= 8 * 2 * 3


# Sums in parts, each on one rank.

SCATTERED = [method for method in ALL if method.route is Route.EXCHANGE]
BOUNDS = [(0, 20, 20, 2000), (0, 0, 2000, 2000), (0, 700, 1400, 2000)]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("method", [m for m in SCATTERED if not isinstance(m, c.SignSGD)], ids=str)
def test_parts_are_the_sums_of_what_each_rank_encodes(method, bounds):
    """Exactly, for methods without feedback; the state is that of each rank's part, in this step."""
    vectors = normals(3, 2000)
    world = ScatteredWorld(c.WithoutFeedback(method), 3, (20, 100), bounds)
    world.step(normals(3, 2000))
    total = world.step(vectors)
    for owner, part in enumerate(world.parts):
        decoded = []
        for rank, vector in enumerate(vectors):
            state = c.State(f"x/for {owner}", rank, 3, shape=(20, 100))
            state.step = 1
            decoded.append(method.decode(method.encode(vector[part], state)))
        np.testing.assert_array_equal(total[part], decoded[0] + decoded[1] + decoded[2])


@pytest.mark.parametrize("bounds", BOUNDS)
def test_parts_are_voted_on(bounds):
    vectors = normals(3, 2000)
    total = ScatteredWorld(c.SignSGD(scaled=False), 3, (20, 100), bounds).step(vectors)
    np.testing.assert_array_equal(total, np.sign(np.sum(np.sign(vectors), axis=0)))


@pytest.mark.parametrize("method", [m for m in SCATTERED if m in BIASED and not isinstance(m, c.SignSGD)], ids=str)
def test_parts_and_residuals_make_up_all_gradients(method):
    """Also after steps without compression, which send all residuals, and with parts of other lengths."""
    world = ScatteredWorld(with_feedback(method), 3, (40, 50), BOUNDS[0])
    given, summed = np.zeros(2000), np.zeros(2000)
    for step in range(12):
        if step == 9:
            world.parts = [slice(*pair) for pair in itertools.pairwise(BOUNDS[2])]
        vectors = normals(3, 2000)
        given += np.sum(vectors, axis=0)
        summed += world.step(vectors, choice=None if step in (6, 11) else ...)
        np.testing.assert_allclose(summed + world.residuals(), given, atol=3e-6 * np.abs(given).max())
        assert world.residuals().any() != (step in (6, 11))
        assert not any("residual" in state.arrays for state in world.states)  # what other parts have left is sent
    assert all(state.step == 12 for state in world.states)


@pytest.mark.parametrize("method", [c.Int8(), c.SignSGD(), None], ids=str)
def test_not_a_number_fills_all_parts_and_changes_no_residual_of_its_rank(method):
    world = ScatteredWorld(method and with_feedback(method), 3, (40, 50), BOUNDS[2])
    world.step(normals(3, 2000))
    before = {name: array.copy() for name, array in world.states[1].saved() if "residual" in name}
    vectors = normals(3, 2000)
    vectors[1][1999] = np.nan
    total = world.step(vectors)
    assert np.isnan(total).all() if method else np.isnan(total[1999])
    after = dict(world.states[1].saved())
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    assert np.isfinite(world.step(normals(3, 2000))).all()


@pytest.mark.parametrize("method", [c.QSGD(), c.Int8(), c.SignSGD()], ids=str)
def test_a_sum_may_begin_before_the_last_one_is_over(method):
    """As where a layer is called twice in a step: sums are the same, whenever the first one ends."""
    first, second = normals(2, 2000), normals(2, 2000)
    in_turn = ScatteredWorld(with_feedback(method), 2, (40, 50), (0, 900, 2000))
    expected = [in_turn.step(first), in_turn.step(second)]
    at_once = ScatteredWorld(with_feedback(method), 2, (40, 50), (0, 900, 2000))
    outs = [[np.empty_like(first[0][part]) for part in at_once.parts] for _ in range(2)]
    begun = [at_once.reductions(vectors, out) for vectors, out in zip((first, second), outs, strict=True)]
    plans = [[fuse_reductions([rank_reduction], pytest.fail) for rank_reduction in each] for each in begun]
    for plan in reversed(plans):
        simulate(2, lambda rank, plan=plan: plan[rank])
    for parts, total in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), total)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_parts_keep_their_dtype(dtype):
    world = ScatteredWorld(with_feedback(c.BFloat16()), 2, (40, 50), (0, 1000, 2000))
    vectors = normals(2, 2000, dtype)
    for choice in (..., None):
        total = world.step(vectors, choice)
        assert total.dtype == dtype
        np.testing.assert_allclose(total.astype(float), vectors[0].astype(float) + vectors[1], atol=3e-5, rtol=2e-2)


def test_parts_that_are_sent_are_counted():
    world = ScatteredWorld(with_feedback(c.Int8()), 4, (100, 200), (0, 5000, 10_000, 15_000, 20_000))
    world.step(normals(4, 20_000))
    for traffic, communicator in zip(world.traffic, world.communicators, strict=True):
        assert communicator.bytes_sent == traffic.sent_bytes
        assert 15_000 < traffic.sent_bytes < 15_500
