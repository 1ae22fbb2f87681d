"""Length of rounds: the number of steps that a process takes on its own between two exchanges."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np

from tfdist.compression.method import Described


class Interval(Described, abc.ABC):
    """The number of local steps of a round. It must be the same on all processes, which compare its ``repr``."""

    @abc.abstractmethod
    def steps(self, step: int, learning_rate: float) -> int:
        """Returns the number of steps of the round that now begins, at least 1.

        Args:
            step: number of steps taken before.
            learning_rate: current learning rate of the optimizer.
        """

    @property
    def least(self) -> int:
        """The fewest steps that a round may have."""
        return 1


def _check(kind: str, name: str, value: object) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{kind} must be a whole number of steps, at least 1; got {name}={value!r}")


class Every(Interval):
    """Rounds of equal length.

    Args:
        count: number of steps of a round.

    Raises:
        ValueError: ``count`` is not a number from 1.
    """

    def __init__(self, count: int) -> None:
        _check("sync_every", "sync_every", count)
        self._count = int(count)

    def __repr__(self) -> str:
        return f"Every({self._count})"

    def steps(self, step: int, learning_rate: float) -> int:
        """Returns the same number of steps for every round."""
        return self._count

    @property
    def least(self) -> int:
        """The number of steps of every round."""
        return self._count


@dataclass(frozen=True)
class Growing(Interval):
    """Rounds that grow longer: ``first`` steps, then ``factor`` times as many after each ``every`` steps.

    Replicas move apart fast early in training, and slowly later.

    Args:
        first: number of steps of the first round.
        every: number of steps after which rounds become longer.
        factor: factor by which rounds become longer, above 1.
        at_most: number of steps of the longest round.

    Raises:
        ValueError: a number is out of its range.
    """

    first: int
    every: int
    factor: float = 2.0
    at_most: int = 1024

    def __post_init__(self) -> None:
        for name in ("first", "every", "at_most"):
            _check("each of Growing's numbers", name, getattr(self, name))
        if not self.factor > 1 or self.at_most < self.first:
            raise ValueError(
                f"Growing needs a factor above 1 and at_most of at least first; got factor={self.factor}, "
                f"first={self.first}, at_most={self.at_most}"
            )

    def steps(self, step: int, learning_rate: float) -> int:
        """Returns the number of steps of the round; see `Interval`."""
        length = float(self.first)
        for _ in range(step // self.every):
            length *= self.factor
            if length >= self.at_most:
                return self.at_most
        return int(length)

    @property
    def least(self) -> int:
        """The number of steps of the first round."""
        return self.first


_ROUNDING = 1 + 1e-6
"""A learning rate of float32 is not exactly the one that was set; a length of 4 must not become 3 by that."""


@dataclass(frozen=True)
class QuadraticRule(Interval):
    """Rounds of (α / learning rate)² steps: the quadratic synchronization rule, for learning rates that decay.

    Replicas are synchronized often while the learning rate is large, and rarely when it has become small.

    Args:
        alpha: α, in units of the learning rate; the authors use 0.25 to 1 times the peak learning rate.
        at_least: number of steps of the shortest round.
        at_most: number of steps of the longest round.

    Raises:
        ValueError: a number is out of its range.

    References:
        Gu, Lyu, Arora, Zhang and Huang, *A quadratic synchronization rule for distributed deep learning*, ICLR 2024.
    """

    alpha: float
    at_least: int = 4
    at_most: int = 1024

    def __post_init__(self) -> None:
        for name in ("at_least", "at_most"):
            _check("each bound of QuadraticRule", name, getattr(self, name))
        if not self.alpha > 0 or self.at_most < self.at_least:
            raise ValueError(
                f"QuadraticRule needs an alpha above 0 and at_most of at least at_least; got alpha={self.alpha}, "
                f"at_least={self.at_least}, at_most={self.at_most}"
            )

    def steps(self, step: int, learning_rate: float) -> int:
        """Returns (α / learning rate)² within the bounds; see `Interval`."""
        if learning_rate <= 0:
            return self.at_most
        length = (self.alpha / learning_rate) ** 2 * _ROUNDING
        return int(min(max(length, self.at_least), self.at_most))

    @property
    def least(self) -> int:
        """The number of steps of the shortest round."""
        return self.at_least
