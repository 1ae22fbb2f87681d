import numpy as np
import pytest

from tfdist import compression as c

rng = np.random.default_rng(1)


def test_one_bit_decodes_to_the_column_means():
    vector = rng.standard_normal(3 * 1500).astype(np.float32)
    decoded = c.OneBit().decode(c.OneBit().encode(vector, c.State(shape=(3, 1500)))).reshape(3, 1500)
    for row, column in zip(decoded, vector.reshape(3, 1500), strict=True):
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
    decoded = method.decode(method.merge(payloads, elements, np.dtype(np.float32), c.State()))
    votes = np.sign(vectors).sum(0)
    np.testing.assert_array_equal(decoded[votes != 0], np.sign(votes)[votes != 0])
    by_turns = np.where(np.arange(elements) % 2, -1, 1)
    np.testing.assert_array_equal(decoded[votes == 0], by_turns[votes == 0])


def test_sign_sgd_breaks_ties_by_turns():
    method = c.SignSGD(scaled=False)
    payloads = [method.encode(np.full(6, sign, np.float32)) for sign in (1, -1)]
    state, totals = c.State(), []
    for state.step in range(2):
        totals.append(method.decode(method.merge(payloads, 6, np.dtype(np.float32), state)))
    np.testing.assert_array_equal(np.abs(totals), 1)
    np.testing.assert_array_equal(totals[0], -totals[1])


@pytest.mark.parametrize(
    ("shape", "column"), [(None, 1024), ((), 1024), ((5, 0), 1024), ((3, 2000), 2000), ((7, 500), 1500), ((1,), 1024)]
)
def test_a_column_of_one_bit_is_the_last_axis_until_it_is_long_enough(shape, column):
    """Whole columns go to one rank."""
    assert c.OneBit().granule(shape) == column


def test_one_bit_averages_a_partial_last_column():
    """Its means are of what there is."""
    vector = np.concatenate([np.full(1024, 1.0), [-4.0, -2.0, 6.0]]).astype(np.float32)
    decoded = c.OneBit().decode(c.OneBit().encode(vector))
    np.testing.assert_allclose(decoded, [1.0] * 1024 + [-3, -3, 6], rtol=1e-6)


def test_one_bit_of_one_sign():
    for sign in (1, -1):
        vector = sign * rng.uniform(1, 2, 3000).astype(np.float32)
        decoded = c.OneBit().decode(c.OneBit().encode(vector))
        np.testing.assert_allclose(decoded[:1024], vector[:1024].mean(), rtol=1e-5)


@pytest.mark.parametrize("scaled", [True, False])
def test_sign_sgds_zeros_are_positive_and_negative_by_turns(scaled):
    vector, state, decoded = np.zeros(8, np.float32), c.State(), []
    vector[3] = -8
    for state.step in range(2):
        decoded.append(c.SignSGD(scaled).decode(c.SignSGD(scaled).encode(vector, state)))
    zeros = np.delete(decoded, 3, axis=1)
    assert (zeros[0] == -zeros[1]).all()
    assert set(zeros[0]) == {1.0, -1.0}  # the mean magnitude is one
    assert [row[3] for row in decoded] == [-1, -1]


def test_a_rank_that_has_only_zeros_does_not_vote():
    method, state = c.SignSGD(), c.State()
    payloads = [method.encode(np.array(v, np.float32), state) for v in ([0, 0, 0], [2, -2, -2], [0, 0, 0])]
    np.testing.assert_array_equal(method.decode(method.merge(payloads, 3, np.dtype(np.float32), state)), [2, -2, -2])
    nobody = method.merge(payloads[::2], 3, np.dtype(np.float32), state)
    np.testing.assert_array_equal(method.decode(nobody), 0)


def test_one_ranks_nan_makes_the_vote_nan():
    method, state = c.SignSGD(), c.State()
    payloads = [method.encode(np.array(v, np.float32), state) for v in ([1, 1], [np.nan, 1])]
    assert np.isnan(method.decode(method.merge(payloads, 2, np.dtype(np.float32), state))).all()


def test_only_sign_sgd_counts_votes():
    assert c.SignSGD().votes
    assert not c.OneBit().votes
    assert c.SignSGD().needs_feedback
    assert not c.SignSGD(scaled=False).needs_feedback  # as in the paper
