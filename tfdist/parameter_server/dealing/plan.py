"""The plan of an epoch: how its samples are divided into batches, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EpochKey = tuple[int, int]
"""Number of the call of `fit`, and number of the epoch in it. Later epochs compare greater."""


@dataclass(frozen=True)
class Plan:
    """The division of an epoch's samples into batches.

    Attributes:
        samples: number of samples; for a source of whole batches, the number of batches. None if a stream brings
            batches until it ends.
        batch_size: number of samples in each batch but the last; 1 for a source of whole batches.
        seed: seed of the order (`order`); None if samples are not shuffled.
        within_batches: whether they are shuffled only within each batch, as Keras does for ``shuffle="batch"``.
    """

    samples: int | None
    batch_size: int
    seed: int | None
    within_batches: bool = False

    @property
    def batches(self) -> int | None:
        """The number of batches; None for a stream, whose end is not known before."""
        return None if self.samples is None else -(-self.samples // self.batch_size)


def order(plan: Plan, epoch: EpochKey) -> np.ndarray:
    """Returns the order of an epoch's samples, equal on every worker whatever its version of NumPy.

    Args:
        plan: plan of the epoch.
        epoch: key of the epoch; each epoch has another order.

    Returns:
        The sample at each place, int64 ``(samples,)``; empty for a stream, which has its own order.
    """
    if plan.samples is None:
        return np.arange(0)
    if plan.seed is None:
        return np.arange(plan.samples)
    words = [word for number in (plan.seed, *epoch) for word in (number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)]
    generator = np.random.RandomState(words)  # unlike Generator, equal in all versions of NumPy
    if not plan.within_batches:
        return generator.permutation(plan.samples).astype(np.int64, copy=False)
    places = np.arange(plan.samples)
    for start in range(0, plan.samples, plan.batch_size):
        generator.shuffle(places[start : start + plan.batch_size])
    return places
