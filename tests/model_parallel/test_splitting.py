"""Parts are contiguous, none is empty, and the most costly one costs least."""

import itertools

import numpy as np
import pytest

from tfdist.model_parallel.splitting import split


def largest(costs, ends):
    return max(sum(costs[begin:end]) for begin, end in zip([0, *ends[:-1]], ends, strict=True))


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
def test_split_minimizes_the_largest_cost(parts):
    generator = np.random.default_rng(parts)
    for _ in range(20):
        costs = generator.integers(0, 10, 6).tolist()
        ends = split(costs, parts)
        assert len(ends) == parts
        assert ends[-1] == 6
        assert all(begin < end for begin, end in itertools.pairwise([0, *ends]))
        every = (sorted((*cuts, 6)) for cuts in itertools.combinations(range(1, 6), parts - 1))
        assert largest(costs, ends) == min(largest(costs, cuts) for cuts in every)


def test_zero_cost_elements_make_nonempty_parts():
    assert split([0, 0, 0], 3) == [1, 2, 3]
    assert split([5], 1) == [1]
