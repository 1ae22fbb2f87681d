"""Policies for late gradients, which modes take as ``late=``.

The *staleness* τ of a gradient is the number of updates that its shard has applied since its worker read the
parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@runtime_checkable
class StalenessPolicy(Protocol):
    """A policy that scales or drops late gradients."""

    def scale(self, staleness: int) -> float | None:
        """Returns the factor of a gradient; None drops it.

        Args:
            staleness: staleness τ of the gradient, at least 0.
        """
        ...


@dataclass(frozen=True)
class Unscaled:
    """A late gradient counts like any other."""

    def scale(self, staleness: int) -> float | None:
        """Returns 1 for any staleness."""
        return 1.0


@dataclass(frozen=True)
class Inverse:
    """A gradient is divided by its staleness, where that is above 1.

    References:
        Zhang, Gupta, Lian and Liu, *Staleness-aware async-SGD for distributed deep learning*, IJCAI 2016.
    """

    def scale(self, staleness: int) -> float | None:
        """Returns 1 / τ, or 1 where τ is 0."""
        return 1.0 / max(1, staleness)


@dataclass(frozen=True)
class Exponential:
    """A gradient is scaled by exp(−``rate`` τ).

    Attributes:
        rate: rate of the decay, above 0.

    References:
        Chan and Lane, *Distributed asynchronous optimization of convolutional neural networks*, Interspeech 2014.
    """

    rate: float = 0.1

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"Exponential(rate=…) must be above 0; got {self.rate!r}")

    def scale(self, staleness: int) -> float | None:
        """Returns exp(−rate τ)."""
        return math.exp(-self.rate * staleness)


@dataclass(frozen=True)
class DropBeyond:
    """A gradient with a staleness of more than ``limit`` is dropped.

    Attributes:
        limit: maximum staleness, at least 0.
    """

    limit: int

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ValueError(f"DropBeyond(limit=…) must be at least 0; got {self.limit!r}")

    def scale(self, staleness: int) -> float | None:
        """Returns 1 up to the limit, and None beyond."""
        return 1.0 if staleness <= self.limit else None


@dataclass(frozen=True)
class DelayCompensated:
    """A late gradient g at the parameters w′ is corrected to an estimate at the newest parameters w: g + λ g² (w − w′).

    The squared gradient approximates the diagonal of the Hessian. A server then keeps the parameters that each worker
    has read.

    Attributes:
        rate: λ, above 0; with ``decay`` it is divided by the root of the moving mean of the squared gradient.
        decay: decay of the moving mean, at least 0 and below 1 (adaptive DC-ASGD); None for a constant λ.

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
        """Returns 1: gradients are corrected, not scaled."""
        return 1.0
