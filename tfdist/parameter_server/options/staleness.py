"""What a late gradient is worth: policies for staleness, which modes take as ``late=``.

The *staleness* τ of a gradient is the number of updates that its shard has applied since its worker read the
parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class StalenessPolicy(Protocol):
    """A policy."""

    def scale(self, staleness: int) -> float | None:
        """The factor of a gradient; None if it is dropped.

        Args:
            staleness: τ, at least 0.
        """
        ...


@dataclass(frozen=True)
class Unscaled:
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


@dataclass(frozen=True)
class DelayCompensated:
    """A late gradient g of the parameters w′ is corrected to what it might be at the parameters w: g + λ g² (w − w′).

    The squared gradient stands in for the diagonal of the Hessian. A server then keeps the parameters that each worker
    has read.

    Attributes:
        rate: λ, above 0; with ``decay`` it is divided by the root of the moving mean of the squared gradient.
        decay: of the moving mean, between 0 and 1 (adaptive DC-ASGD); None for a constant λ.

    References:
        Zheng et al., *Asynchronous stochastic gradient descent with delay compensation*, ICML 2017 (DC-ASGD).
    """

    rate: float = 0.04
    decay: float | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"DelayCompensated(rate=…) must be above 0; got {self.rate!r}")
        if self.decay is not None and not 0 <= self.decay < 1:
            raise ValueError(f"DelayCompensated(decay=…) must be at least 0 and below 1; got {self.decay!r}")

    def scale(self, staleness: int) -> float | None:
        """1."""
        return 1.0
