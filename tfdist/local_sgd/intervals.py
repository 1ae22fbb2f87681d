"""How many steps a process takes on its own before the next round ends."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import numpy as np

from tfdist.compression.method import Described


class Interval(Described, abc.ABC):
    """The number of local steps of a round. Must be the same on all processes, which compare its ``repr``."""

    @abc.abstractmethod
    def steps(self, step: int, learning_rate: float) -> int:
        """The steps of the round that now begins, at least 1.

        Args:
            step: how many have been taken before.
            learning_rate: of the optimizer, now.
        """

    @property
    def least(self) -> int:
        """The fewest steps that a round may have."""
        return 1


def _check(kind: str, name: str, value: object) -> None:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{kind} is a number of steps from 1; got {name}={value!r}")


class Every(Interval):
    """Rounds of equal length.

    Args:
        count: of steps.

    Raises:
        ValueError: ``count`` is no number from 1.
    """

    def __init__(self, count: int) -> None:
        _check("sync_every", "sync_every", count)
        self._count = int(count)

    def __repr__(self) -> str:
        return f"Every({self._count})"

    def steps(self, step: int, learning_rate: float) -> int:
        """See `Interval`."""
        return self._count

    @property
    def least(self) -> int:
        """See `Interval`."""
        return self._count


@dataclass(frozen=True)
class Growing(Interval):
    """Rounds that grow longer: ``first`` steps, then ``factor`` times as many after each ``every`` steps.

    Early in training replicas move apart fast, later they do not.

    Args:
        first: steps of the first round.
        every: after how many steps rounds become longer.
        factor: by which, above 1.
        at_most: steps of the longest round.

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
        if self.factor <= 1 or self.at_most < self.first:
            raise ValueError(
                f"Growing needs a factor above 1 and at_most of at least first; got factor={self.factor}, "
                f"first={self.first}, at_most={self.at_most}"
            )

    def steps(self, step: int, learning_rate: float) -> int:
        """See `Interval`."""
        length = float(self.first)
        for _ in range(step // self.every):
            length *= self.factor
            if length >= self.at_most:
                return self.at_most
        return int(length)

    @property
    def least(self) -> int:
        """See `Interval`."""
        return self.first


@dataclass(frozen=True)
class QuadraticRule(Interval):
    """Rounds of (α / learning rate)² steps: the quadratic synchronization rule, for learning rates that decay.

    While the learning rate is large, replicas meet often; when it has become small, seldom.

    Args:
        alpha: α, in units of the learning rate; its authors take a quarter to once the peak learning rate's size.
        at_least: steps of the shortest round.
        at_most: steps of the longest one.

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
        if self.alpha <= 0 or self.at_most < self.at_least:
            raise ValueError(
                f"QuadraticRule needs an alpha above 0 and at_most of at least at_least; got alpha={self.alpha}, "
                f"at_least={self.at_least}, at_most={self.at_most}"
            )

    def steps(self, step: int, learning_rate: float) -> int:
        """See `Interval`."""
        if learning_rate <= 0:
            return self.at_most
        return int(min(max((self.alpha / learning_rate) ** 2, self.at_least), self.at_most))

    @property
    def least(self) -> int:
        """See `Interval`."""
        return self.at_least
