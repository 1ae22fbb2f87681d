"""Coded index sets: round trips, and their size against the entropy of the gaps."""

import numpy as np
import pytest

import tfdist
from tfdist.compression import indices as coding

rng = np.random.default_rng(2)


def entropy_bytes(gaps):
    _, counts = np.unique(gaps, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) * len(gaps) / 8


@pytest.mark.parametrize("share", [0.0005, 0.001, 0.01, 0.05, 0.2, 0.5, 0.8, 0.99])
def test_random_sets_take_the_entropy_of_their_gaps(share):
    total = 2_000_000 if share < 0.05 else 200_000
    members = np.flatnonzero(rng.random(total) < share)
    coded = coding.encode(members, total)
    np.testing.assert_array_equal(coding.decode(coded, total), members)
    # Of a geometric distribution; the entropy of so few observed gaps falls short of it where there are few.
    entropy = -(share * np.log2(share) + (1 - share) * np.log2(1 - share)) / share * len(members) / 8
    assert len(coded) < 1.1 * entropy


@pytest.mark.parametrize(
    "gaps",
    {
        "all neighbours": np.ones(50_000, int),
        "evenly spaced": np.full(50_000, 1000),
        "two gaps": rng.choice([1, 1000], 50_000, p=[0.95, 0.05]),
        "powers of two": 2 ** rng.integers(0, 20, 50_000),
        "heavy tail": np.minimum(rng.zipf(1.7, 50_000), 10**6),
    }.items(),
    ids=lambda pair: pair[0],
)
def test_adversarial_sets_take_the_entropy_of_their_gaps(gaps):
    members = np.cumsum(gaps[1]) - 1
    total = int(members[-1]) + 7
    coded = coding.encode(members, total)
    np.testing.assert_array_equal(coding.decode(coded, total), members)
    assert len(coded) < 1.1 * entropy_bytes(gaps[1]) + 100


@pytest.mark.parametrize(
    ("members", "total"),
    [
        ([], 0), ([], 10), ([0], 1), ([9], 10), (list(range(10)), 10), ([0, 2**33], 2**34), ([2**40], 2**41),
        ([0, 1, 2**20, 2**20 + 1, 2**32], 2**33),
    ],
)  # fmt: skip
def test_small_and_huge_index_sets_are_restored(members, total):
    members = np.array(members, np.int64)
    np.testing.assert_array_equal(coding.decode(coding.encode(members, total), total), members)


def test_indices_beyond_the_end_are_an_error():
    coded = coding.encode(np.array([5, 99]), 100)
    with pytest.raises(tfdist.PayloadError, match="between 0 and 98; got 5 to 99"):
        coding.decode(coded, 99)


@pytest.mark.parametrize("cut", [0, 5, 15, 30])
def test_truncated_index_set_raises(cut):
    coded = coding.encode(np.flatnonzero(rng.random(10_000) < 0.1), 10_000)
    with pytest.raises(tfdist.PayloadError, match="damaged"):
        coding.decode(coded[:cut], 10_000)
