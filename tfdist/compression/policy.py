"""Which method for which tensor, and when."""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.compression.feedback import with_feedback
from tfdist.compression.method import Described, Method

SMALL = 1024
"""Tensors of fewer elements are not compressed by default: their messages are short anyway."""


@dataclass(frozen=True)
class FewerWorkers:
    """Only the gradients of the first ranks count, times as many; the others wait. For the start of an epoch or a run.

    Early gradients are large and change direction; added over many workers, late because compressed, they diverge.
    Ranks are taken to have equal shares of a batch: of a short last one the first ranks may have more, and then their
    gradients count for more than the batch's.

    Args:
        workers: how many ranks count; 1 or more.
        method: how they are sent; uncompressed by default.

    Raises:
        ValueError: there are none.

    References:
        Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015.
    """

    workers: int
    method: Method | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1; got {self.workers}")
        _check(self.method, (Method,), "FewerWorkers' method is")


Choice = Method | FewerWorkers | None
"""What is done to a tensor in one step; None: it is sent as it is."""


class Schedule:
    """Another choice from certain steps on.

    Args:
        choices: by the first step that each is for; step 0 among them.
        every: begins again after so many steps, such as those of an epoch; never by default.

    Raises:
        ValueError: no choice is for step 0.

    Example:
        >>> Schedule({0: FewerWorkers(1), 200: None, 1000: TopK(0.05), 2000: TopK(0.01)})
    """

    def __init__(self, choices: Mapping[int, Choice], every: int | None = None) -> None:
        if 0 not in choices or min(choices) < 0:
            raise ValueError(f"a schedule begins with step 0; got steps {sorted(choices)}")
        if every is not None and every <= max(choices):
            raise ValueError(f"every must be above the last step of the schedule, {max(choices)}; got {every}")
        for choice in choices.values():
            _check(choice, (Method, FewerWorkers), "a schedule holds")
        self._choices = {step: _completed(choice) for step, choice in sorted(choices.items())}
        self._every = every

    def __repr__(self) -> str:
        return f"Schedule({self._choices}, every={self._every})"

    @property
    def compresses(self) -> bool:
        """Whether there are steps in which something is done at all."""
        return any(choice is not None for choice in self._choices.values())

    @property
    def momenta(self) -> set[float]:
        """What its methods apply in place of the optimizer's momentum."""
        methods = [choice.method if isinstance(choice, FewerWorkers) else choice for choice in self._choices.values()]
        return {method.momentum for method in methods if method is not None and method.momentum}

    def at(self, step: int) -> Choice:
        """The choice for a step."""
        if self._every is not None:
            step %= self._every
        return self._choices[max(first for first in self._choices if first <= step)]


class Policy(Described, abc.ABC):
    """Chooses by what a tensor is. The same on all ranks, which they see by its ``repr``."""

    @abc.abstractmethod
    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """What is done to a tensor.

        Args:
            name: path of the variable, such as ``sequential/dense/kernel``.
            shape: of it.
        """


class _BySize(Policy):
    def __init__(self, choices: Mapping[int, Choice | Schedule | Policy]) -> None:
        if 0 not in choices or min(choices) < 0:
            raise ValueError(f"by_size needs a choice for 0 elements; got {sorted(choices)}")
        for choice in choices.values():
            _check(choice, (Method, FewerWorkers, Schedule, Policy), "by_size holds")
        self._choices = dict(sorted(choices.items()))

    def __repr__(self) -> str:
        return f"by_size({self._choices})"

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """See `Policy`."""
        return self._choices[max(least for least in self._choices if least <= math.prod(shape))]


class _ByName(Policy):
    def __init__(
        self, choices: Mapping[str, Choice | Schedule | Policy], otherwise: Choice | Schedule | Policy
    ) -> None:
        for choice in (*choices.values(), otherwise):
            _check(choice, (Method, FewerWorkers, Schedule, Policy), "by_name holds")
        self._choices = {re.compile(pattern): choice for pattern, choice in choices.items()}
        self._otherwise = otherwise

    def __repr__(self) -> str:
        named = {pattern.pattern: choice for pattern, choice in self._choices.items()}
        return f"by_name({named}, otherwise={self._otherwise})"

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """See `Policy`."""
        for pattern, choice in self._choices.items():
            if pattern.search(name):
                return choice
        return self._otherwise


class _SkippingSmall(Policy):
    def __init__(self, choice: Choice | Schedule | Policy, elements: int, vectors: bool) -> None:
        _check(choice, (Method, FewerWorkers, Schedule, Policy), "skip_small takes")
        self._choice, self._elements, self._vectors = choice, elements, vectors

    def __repr__(self) -> str:
        return f"skip_small({self._choice}, elements={self._elements}, vectors={self._vectors})"

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """See `Policy`."""
        small = math.prod(shape) < self._elements or (self._vectors and len(shape) < 2)
        return None if small else self._choice


def by_size(choices: Mapping[int, Choice | Schedule | Policy]) -> Policy:
    """Chooses by the number of elements.

    Args:
        choices: by the least number that each is for; 0 among them.

    Example:
        >>> by_size({0: None, 1 << 10: Int8(), 1 << 20: TopK(0.01)})
    """
    return _BySize(choices)


def by_name(choices: Mapping[str, Choice | Schedule | Policy], otherwise: Choice | Schedule | Policy = None) -> Policy:
    """Chooses by the variable's path.

    Args:
        choices: by regular expression, of which the first counts that is found in the path.
        otherwise: where none is found.

    Example:
        >>> by_name({"bias|gamma|beta": None, "embedding": Int8()}, otherwise=skip_small(TopK(0.01)))
    """
    return _ByName(choices, otherwise)


def skip_small(choice: Choice | Schedule | Policy, elements: int = SMALL, vectors: bool = True) -> Policy:
    """Leaves alone what is not worth compressing, or takes harm: small tensors, biases and normalization.

    This is what a strategy does with a bare method or schedule.

    Args:
        choice: for all others.
        elements: that a tensor must have.
        vectors: whether scalars and vectors are left alone too: biases, and the weights of normalization.
    """
    return _SkippingSmall(choice, elements, vectors)


def as_policy(compression: Choice | Schedule | Policy) -> Policy:
    """What a user gives to a strategy, as a policy.

    Raises:
        TypeError: it is something else.
    """
    _check(compression, (Method, FewerWorkers, Schedule, Policy), "compression must be")
    return compression if isinstance(compression, Policy) else skip_small(compression)


def chosen(policy: Policy, name: str, shape: tuple[int, ...]) -> Schedule | None:
    """What a policy says of a tensor; None where it is never compressed."""
    choice: Choice | Schedule | Policy = policy
    while isinstance(choice, Policy):
        choice = choice.choose(name, shape)
    if choice is None or isinstance(choice, Schedule):
        return choice
    return Schedule({0: choice})


def _completed(choice: Choice) -> Choice:
    if isinstance(choice, FewerWorkers):
        return FewerWorkers(choice.workers, choice.method and with_feedback(choice.method))
    return choice and with_feedback(choice)


def _check(choice: object, kinds: tuple[type, ...], what: str) -> None:
    if isinstance(choice, type) and issubclass(choice, kinds):
        raise TypeError(f"{what} an object, such as {choice.__name__}(); got the class {choice.__name__}")
    if choice is not None and not isinstance(choice, kinds):
        names = ", ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{what} None or one of {names} of tfdist.compression; got {choice!r}")
