"""Choice of the method for each tensor and step."""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfdist.compression.feedback import plain, with_feedback
from tfdist.compression.method import Described, Method, Route

SMALL = 1024
"""Tensors with fewer elements are not compressed by default, because their messages are short."""


@dataclass(frozen=True)
class FewerWorkers:
    """Uses only the gradients of the first ranks, scaled up accordingly. For the start of an epoch or a run.

    Early gradients are large and change direction; if they are summed over many workers and delayed by compression,
    training may diverge. Ranks are assumed to have equal shares of a batch. In a short last batch the first ranks may
    have more, and their gradients then weigh more than the batch's.

    Args:
        workers: the number of ranks whose gradients are used; 1 or more.
        method: method that compresses their gradients; by default they are not compressed.

    Raises:
        ValueError: ``workers`` is below 1.

    References:
        Strom, Scalable distributed DNN training using commodity GPU cloud computing, 2015.
    """

    workers: int
    method: Method | None = None

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1; got {self.workers}")
        _check(self.method, (Method,), "FewerWorkers' method must be")


Choice = Method | FewerWorkers | None
"""How a tensor is sent in one step; None sends it uncompressed."""


class Schedule:
    """Changes the choice at certain steps.

    Args:
        choices: choices by the first step that each applies to; must include step 0.
        every: number of steps after which the schedule repeats, such as those of an epoch; by default it does not.

    Raises:
        ValueError: there is no choice for step 0, or ``every`` is not above the last step.

    Example:
        >>> Schedule({0: FewerWorkers(1), 200: None, 1000: TopK(0.05), 2000: TopK(0.01)})
    """

    def __init__(self, choices: Mapping[int, Choice], every: int | None = None) -> None:
        if 0 not in choices or min(choices) < 0:
            raise ValueError(f"a schedule begins with step 0; got steps {sorted(choices)}")
        if every is not None and every <= max(choices):
            raise ValueError(f"every must be above the last step of the schedule, {max(choices)}; got {every}")
        for choice in choices.values():
            _check(choice, (Method, FewerWorkers), "each choice of a schedule must be")
        self._choices = {step: _completed(choice) for step, choice in sorted(choices.items())}
        self._every = every

    def __repr__(self) -> str:
        return f"Schedule({self._choices}, every={self._every})"

    @property
    def compresses(self) -> bool:
        """Whether any step has a choice other than None."""
        return any(choice is not None for choice in self._choices.values())

    @property
    def momenta(self) -> set[float]:
        """The momenta that its methods apply in place of the optimizer's."""
        return {method.momentum for method in self.methods if method.momentum}

    @property
    def methods(self) -> list[Method]:
        """The methods of its choices, in the order of steps."""
        methods = [choice.method if isinstance(choice, FewerWorkers) else choice for choice in self._choices.values()]
        return [method for method in methods if method is not None]

    @property
    def choices(self) -> list[Choice]:
        """The choices of the schedule, in the order of steps."""
        return list(self._choices.values())

    def at(self, step: int) -> Choice:
        """Returns the choice for a step."""
        if self._every is not None:
            step %= self._every
        return self._choices[max(first for first in self._choices if first <= step)]


class Policy(Described, abc.ABC):
    """Chooses by a tensor's name and shape. Must be the same on all ranks, which compare its ``repr``."""

    @abc.abstractmethod
    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """Returns the choice for a tensor.

        Args:
            name: the path of the variable, such as ``sequential/dense/kernel``.
            shape: shape of the variable.
        """


class _BySize(Policy):
    def __init__(self, choices: Mapping[int, Choice | Schedule | Policy]) -> None:
        if 0 not in choices or min(choices) < 0:
            raise ValueError(f"by_size needs a choice for 0 elements; got {sorted(choices)}")
        for choice in choices.values():
            _check(choice, (Method, FewerWorkers, Schedule, Policy), "each choice of by_size must be")
        self._choices = dict(sorted(choices.items()))

    def __repr__(self) -> str:
        return f"by_size({self._choices})"

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """Returns the choice for the tensor's number of elements; see `Policy`."""
        return self._choices[max(least for least in self._choices if least <= math.prod(shape))]


class _ByName(Policy):
    def __init__(
        self, choices: Mapping[str, Choice | Schedule | Policy], otherwise: Choice | Schedule | Policy
    ) -> None:
        for choice in (*choices.values(), otherwise):
            _check(choice, (Method, FewerWorkers, Schedule, Policy), "each choice of by_name must be")
        self._choices = {re.compile(pattern): choice for pattern, choice in choices.items()}
        self._otherwise = otherwise

    def __repr__(self) -> str:
        named = {pattern.pattern: choice for pattern, choice in self._choices.items()}
        return f"by_name({named}, otherwise={self._otherwise})"

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """Returns the choice of the first expression that matches; see `Policy`."""
        for pattern, choice in self._choices.items():
            if pattern.search(name):
                return choice
        return self._otherwise


class _SkippingSmall(Policy):
    def __init__(self, choice: Choice | Schedule | Policy, elements: int, vectors: bool) -> None:
        _check(choice, (Method, FewerWorkers, Schedule, Policy), "the choice of skip_small must be")
        self._choice, self._elements, self._vectors = choice, elements, vectors

    def __repr__(self) -> str:
        return f"skip_small({self._choice}, elements={self._elements}, vectors={self._vectors})"

    def choose(self, name: str, shape: tuple[int, ...]) -> Choice | Schedule | Policy:
        """Returns None for a small tensor, else the choice; see `Policy`."""
        small = math.prod(shape) < self._elements or (self._vectors and len(shape) < 2)
        return None if small else self._choice


def by_size(choices: Mapping[int, Choice | Schedule | Policy]) -> Policy:
    """Returns a policy that chooses by the number of elements.

    Args:
        choices: choices by the smallest number of elements that each applies to; must include 0.

    Example:
        >>> by_size({0: None, 1 << 10: Int8(), 1 << 20: TopK(0.01)})
    """
    return _BySize(choices)


def by_name(choices: Mapping[str, Choice | Schedule | Policy], otherwise: Choice | Schedule | Policy = None) -> Policy:
    """Returns a policy that chooses by the variable's path.

    Args:
        choices: choices by regular expression; the first that matches anywhere in the path is used.
        otherwise: choice if no expression matches.

    Example:
        >>> by_name({"bias|gamma|beta": None, "embedding": Int8()}, otherwise=skip_small(TopK(0.01)))
    """
    return _ByName(choices, otherwise)


def skip_small(choice: Choice | Schedule | Policy, elements: int = SMALL, vectors: bool = True) -> Policy:
    """Returns a policy that does not compress small tensors, biases and normalization weights.

    Compression of these is useless or harmful. Strategies apply the policy to a bare method or schedule.

    Args:
        choice: the choice for all other tensors.
        elements: the smallest number of elements that is compressed.
        vectors: whether scalars and vectors (biases, and the weights of normalization) are not compressed either.
    """
    return _SkippingSmall(choice, elements, vectors)


def as_policy(compression: Choice | Schedule | Policy, scatters: bool = False) -> Policy:
    """Converts a strategy's ``compression`` argument to a policy.

    Args:
        compression: the argument.
        scatters: whether each process gets its parts of sums only.

    Raises:
        TypeError: ``compression`` is not a method, a schedule or a policy.
        ValueError: sums are scattered, and a method cannot do that; those that a policy may choose are not known yet.
    """
    _check(compression, (Method, FewerWorkers, Schedule, Policy), "compression must be")
    if scatters and not isinstance(compression, Policy):
        check_scatters(compression)
    return compression if isinstance(compression, Policy) else skip_small(compression)


def chosen(policy: Policy, name: str, shape: tuple[int, ...]) -> Schedule | None:
    """Returns the schedule that a policy chooses for a tensor; None if the tensor is never compressed."""
    choice: Choice | Schedule | Policy = policy
    while isinstance(choice, Policy):
        choice = choice.choose(name, shape)
    if choice is None or isinstance(choice, Schedule):
        return choice
    return Schedule({0: choice})


def check_scatters(choice: Choice | Schedule, path: str = "") -> None:
    """Checks that sums can be made in parts, each on one process alone (reduce-scatter).

    Args:
        choice: the choice for a tensor.
        path: path of the tensor's variable, for the message.

    Raises:
        ValueError: a method sends whole tensors.
    """
    schedule = choice if isinstance(choice, Schedule) else Schedule({0: choice})
    for method in schedule.methods:
        if method.route is not Route.EXCHANGE:
            of = f" for {path}" if path else ""
            raise ValueError(
                f"{plain(method)!r}{of} compresses a gradient as a whole, and each process is to get a part of its "
                "sum. Use Float16, BFloat16, Float8, Int8, Int4, QSGD, OneBit or SignSGD; or leave out shard="
            )


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
