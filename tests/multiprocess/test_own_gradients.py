"""Reducing can be left out for a step: each replica then applies the gradient of its own share."""

import json
from functools import cache

import numpy as np
import pytest

from tests.multiprocess import harness

PROGRAM = harness.PROGRAMS / "own_gradients.py"
SIZES = [4, 4, 3, 3, 1, 1, 5, 5]
PATTERN = [True, True, False, False, False, False, True, True]
CASES = {
    "switched": PATTERN,
    "eager": PATTERN,
    "scaled": PATTERN,
    "accumulated": PATTERN,
    "fixed": [False] * len(SIZES),
}


def expected(replicas, pattern, accumulates):
    """Weights after each step, of every replica, by the formulas."""
    weights = np.zeros(replicas)
    held = np.zeros(replicas)
    found, first = [], 0
    for step, (size, reduces) in enumerate(zip(SIZES, pattern, strict=True)):
        parts = np.array_split(np.arange(first, first + size, dtype=float), replicas)
        first += size
        gradients = np.array(
            [2 * (w - part.mean()) if part.size else 0 for w, part in zip(weights, parts, strict=True)]
        )
        if reduces:
            gradients = gradients * [part.size / size for part in parts]
        held += gradients / (2 if accumulates else 1)
        if not accumulates or step % 2:
            weights = weights - 0.1 * (held.sum() if reduces else held)
            held = np.zeros(replicas)
        found.append(weights)
    return np.array(found)


@cache
def trained(size, devices):
    return harness.results(harness.run([str(PROGRAM), json.dumps([devices, SIZES, CASES])], size))


@pytest.mark.multiprocess
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("size", "devices"), [(1, 2), (2, 1)], ids=["two-devices", "two-processes"])
def test_gradients_stay_a_replicas_own(case, size, devices):
    pattern = CASES[case]
    ranks = [rank[case] for rank in trained(size, devices)]
    found = np.concatenate([rank["weights"] for rank in ranks], axis=1)
    np.testing.assert_allclose(found, expected(size * devices, pattern, case == "accumulated"), rtol=1e-12)
    assert found[3, 0] != found[3, 1]
    assert found[5, 1] == found[3, 1]  # without samples nothing is applied
    if case != "eager":
        assert ranks[0]["traces"] == ranks[-1]["traces"] == devices  # one graph serves both kinds of steps
