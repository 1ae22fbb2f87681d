"""Divides a sequence into parts of equal cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def split(costs: Sequence[float], parts: int) -> list[int]:
    """Divides a sequence into contiguous parts, so that the most costly part costs as little as possible.

    Dynamic programming over where the last part begins; among equal solutions, earlier parts are the shorter ones.

    Args:
        costs: costs of the elements, not negative.
        parts: number of parts, none of which is empty; at most the number of elements.

    Returns:
        Where each part ends: ``parts`` rising indices, the last of which is the number of elements.
    """
    count = len(costs)
    sums = [0.0, *itertools.accumulate(costs)]
    # best[n] is the cost of the most costly part, with the first n elements in the parts so far.
    best = [0.0] + [float("inf")] * count
    begins: list[list[int]] = []
    for _ in range(parts):
        following = [float("inf")] * (count + 1)
        begin = [0] * (count + 1)
        for end in range(1, count + 1):
            for start in range(end):
                cost = max(best[start], sums[end] - sums[start])
                if cost < following[end]:
                    following[end], begin[end] = cost, start
        best = following
        begins.append(begin)
    ends = [count]
    for begin in reversed(begins[1:]):
        ends.append(begin[ends[-1]])
    return ends[::-1]
