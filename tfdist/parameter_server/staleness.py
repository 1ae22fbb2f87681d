"""What a late gradient is worth: policies for staleness.

The *staleness* τ of a gradient is the number of updates that its shard has applied since its worker read the
parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


class StalenessPolicy(Protocol):
    """A policy."""

    def scale(self, staleness: int) -> float | None:
        """The factor of a gradient; None if it is dropped.

        Args:
            staleness: τ, at least 0.
        """
        ...


@dataclass(frozen=True)
class AsItIs:
    """A late gradient counts as any other."""

    def scale(self, staleness: int) -> float | None:
        """1."""
        return 1.0


@dataclass(frozen=True)
class Inverse:
    """A gradient is divided by its staleness, where that is above 1.

    References:
        Zhang, Gupta, Lian and Liu, *Staleness-aware async-SGD for distributed deep learning*, IJCAI 2016.
    """

    def scale(self, staleness: int) -> float | None:
        """1 / τ."""
        return 1.0 / max(1, staleness)


@dataclass(frozen=True)
class Exponential:
    """A gradient is scaled by exp(−``rate`` τ).

    Attributes:
        rate: above 0.

    References:
        Chan and Lane, *Distributed asynchronous optimization of convolutional neural networks*, Interspeech 2014.
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"Exponential(rate=…) must be above 0; got {self.rate!r}")

    def scale(self, staleness: int) -> float | None:
        """exp(−rate τ)."""
        return math.exp(-self.rate * staleness)


@dataclass(frozen=True)
class DropBeyond:
    """A gradient with more than ``limit`` updates since its read is dropped.

    Attributes:
        limit: at least 0.
    """

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"DropBeyond(limit=…) must be at least 0; got {self.limit!r}")

    def scale(self, staleness: int) -> float | None:
        """1 up to the limit."""
        return 1.0 if staleness <= self.limit else None
