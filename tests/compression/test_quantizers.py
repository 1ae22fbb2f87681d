import numpy as np
import pytest

from tests.compression.test_reduction import World
from tfdist import compression as c
from tfdist.compression.feedback import with_feedback
from tfdist.compression.payload import HEADER_BYTES

rng = np.random.default_rng(1)
EVEN = pytest.mark.parametrize(("method", "most"), [(c.Int8(block=50), 127), (c.Int4(block=50), 7)], ids=str)


def test_tern_grad_clips_at_2_5_standard_deviations():
    vector = rng.standard_normal(4000).astype(np.float32)
    vector[7] = 100.0
    limit = 2.5 * float(np.sqrt(np.mean(vector.astype(np.float64) ** 2)))
    state, total = c.State(), np.zeros(4000)
    method = c.TernGrad(block=1000)
    for step in range(300):
        state.step = step
        decoded = method.decode(method.encode(vector, state))
        scalers = np.abs(decoded).reshape(4, 1000).max(1)
        np.testing.assert_allclose(scalers[0], limit, rtol=1e-5)
        assert (np.isin(np.abs(decoded).reshape(4, 1000), [0, *scalers])).all()
        total += decoded / 300
    expected = np.clip(vector, -limit, limit)
    assert total[7] == pytest.approx(limit, rel=1e-5)
    assert abs((total - expected) @ expected) < 0.02 * (expected @ expected)
    unclipped = c.TernGrad(block=1000, clip=None)
    assert np.abs(unclipped.decode(unclipped.encode(vector, state))).max() == 100.0
    assert not method.unbiased
    assert unclipped.unbiased
    assert with_feedback(method) is method  # as in the paper


def test_tern_grads_ranks_share_their_scalers():
    """A sum has 2 N + 1 values in each block; a rank whose vector is not finite does not change the others' scalers."""
    vectors = [scale * rng.standard_normal(2000).astype(np.float32) for scale in (1, 3, 0.1)]
    world = World(c.TernGrad(block=500, clip=None), 3, (2000,))
    scalers = np.abs(vectors).max(0).reshape(4, 500).max(1)
    total = world.step(vectors).reshape(4, 500) / scalers[:, np.newaxis]
    np.testing.assert_allclose(total, np.rint(total), atol=1e-6)
    assert np.abs(total).max() <= 3.001
    assert all(state.scalers is None for state in world.states)
    clipped = World(c.TernGrad(block=2000), 3, (2000,)).step(vectors)
    scaler = np.abs(clipped)[clipped != 0].min()
    assert scaler == pytest.approx(2.5 * max(np.sqrt(np.mean(vector**2)) for vector in vectors), rel=1e-5)


def test_tern_grad_with_feedback():
    """With random levels only a fraction is sent, so that the residual does not grow, even with clipping."""
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


@EVEN
@pytest.mark.parametrize("elements", [1, 50, 51, 1234])
def test_an_element_is_at_most_half_a_level_off(method, most, elements):
    """Levels depend on the largest element of a block, which is exact; the last block may be shorter."""
    vector = rng.standard_normal(elements).astype(np.float32)
    decoded = method.decode(method.encode(vector))
    for begin in range(0, elements, 50):
        block, of_block = vector[begin : begin + 50], decoded[begin : begin + 50]
        largest = np.abs(block).max()
        assert np.abs(of_block - block).max() <= 1.0001 * largest / (2 * most)
        place = np.abs(block).argmax()
        assert of_block[place] == pytest.approx(block[place], rel=1e-6)


@EVEN
def test_blocks_do_not_know_of_each_other(method, most):
    vector = rng.standard_normal(200).astype(np.float32)
    decoded = method.decode(method.encode(vector))
    vector[50:100] *= 1e6
    again = method.decode(method.encode(vector))
    np.testing.assert_array_equal(np.delete(again, slice(50, 100)), np.delete(decoded, slice(50, 100)))


@pytest.mark.parametrize(
    ("method", "bits"),
    [(c.Int8(), 8), (c.Int4(), 4), (c.TernGrad(), 2), (c.QSGD(1), 2), (c.QSGD(2), 4), (c.QSGD(7), 4), (c.QSGD(8), 8)],
    ids=str,
)
@pytest.mark.parametrize("elements", [1, 9, 10_000])
def test_levels_take_as_many_bits_as_they_need(method, bits, elements):
    """And a block's scale 4 bytes."""
    blocks = -(-elements // method.block)
    size = method.encode(np.ones(elements, np.float32)).size
    assert size == HEADER_BYTES + 4 * blocks + -(-elements * bits // 8) == method.payload_bytes(elements)
    assert method.granule((3, 4)) == method.block


@pytest.mark.parametrize("levels", [1, 7, 127])
def test_qsgds_levels_are_parts_of_the_blocks_norm(levels):
    vector = rng.standard_normal(64).astype(np.float32)
    decoded = c.QSGD(levels, 64).decode(c.QSGD(levels, 64).encode(vector))
    steps = decoded / (np.linalg.norm(vector) / levels)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
    assert np.abs(steps - levels * vector / np.linalg.norm(vector)).max() < 1.001
    assert (decoded * vector >= 0).all()


def test_subnormal_block_decodes_to_zeros():
    for method in (c.Int8(), c.Int4(), c.QSGD(), c.TernGrad()):
        decoded = method.decode(method.encode(np.full(10, 1e-44, np.float32)))
        np.testing.assert_array_equal(decoded, 0)
