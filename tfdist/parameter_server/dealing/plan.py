"""How the samples of an epoch are divided into batches, and in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EpochKey = tuple[int, int]
"""An epoch: the number of the fit, and the number of the epoch in it. Later ones are greater."""


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch are divided.

    Attributes:
        samples: their number; of a source of whole batches, the number of batches. None if a stream brings batches
            until it ends.
        batch_size: samples in each batch but the last; 1 for a source of whole batches.
        seed: of the order, see `order`; None if samples are not shuffled.
    """

    samples: int | None
    batch_size: int
    seed: int | None

    @property
    def batches(self) -> int | None:
        """The number of batches; None if it shows when the stream ends."""
        return None if self.samples is None else -(-self.samples // self.batch_size)


def order(plan: Plan, epoch: EpochKey, within_batches: bool = False) -> np.ndarray:
    """The order of an epoch's samples, equal on every worker whatever its version of NumPy.

    Args:
        plan: of the epoch.
        epoch: each has another order.
        within_batches: shuffle the samples of each batch only, as Keras does for ``shuffle="batch"``.

    Returns:
        int64 ``(samples,)``: the sample at each place. Nothing of a stream, which has an order of its own.
    """
    if plan.samples is None:
        return np.arange(0)
    if plan.seed is None:
        return np.arange(plan.samples)
    words = [word for number in (plan.seed, *epoch) for word in (number & 0xFFFFFFFF, number >> 32 & 0xFFFFFFFF)]
    generator = np.random.RandomState(words)  # its numbers never change between versions, unlike those of Generator
    if not within_batches:
        return generator.permutation(plan.samples).astype(np.int64, copy=False)
    places = np.arange(plan.samples)
    for start in range(0, plan.samples, plan.batch_size):
        generator.shuffle(places[start : start + plan.batch_size])
    return places
