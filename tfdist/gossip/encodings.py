"""Encodings of the weights that a process sends, and the change that neighbours' weights make to its own."""

from __future__ import annotations

import abc
import functools
from collections.abc import Mapping, Sequence

import numpy as np

from tfdist.compression import differences
from tfdist.compression.method import Method
from tfdist.compression.policy import Schedule
from tfdist.compression.state import State

Arrays = Sequence[np.ndarray]


class Encoding(abc.ABC):
    """An encoding of the weights of all variables."""

    @abc.abstractmethod
    def begin(self, values: Arrays, ranks: Sequence[int]) -> None:
        """Begins anew with common weights.

        Args:
            values: the weights, equal on all processes; only read.
            ranks: ranks of all processes that this one receives from.
        """

    @abc.abstractmethod
    def sent(self, values: Arrays) -> list[np.ndarray]:
        """Returns the parts of a message to all neighbours.

        Args:
            values: weights of this process; only read, and kept until `change`.
        """

    @abc.abstractmethod
    def received(self, rank: int, parts: Arrays) -> None:
        """Decodes the message of a neighbour, and keeps its contents until `change`.

        Args:
            rank: rank of the sender.
            parts: parts of the message.
        """

    @abc.abstractmethod
    def change(self, weights: Mapping[int, float]) -> list[np.ndarray]:
        """Returns the change to this process's weights: Σ_j W_ij (x_j − x_i), of what was sent and received last.

        Args:
            weights: W_ij, by rank j.
        """


class Plain(Encoding):
    """An encoding that sends the weights as they are."""

    def __init__(self) -> None:
        self._own: Arrays = ()
        self._of: dict[int, Arrays] = {}

    def begin(self, values: Arrays, ranks: Sequence[int]) -> None:
        """Forgets the neighbours' weights; see `Encoding`."""
        self._own, self._of = values, {}

    def sent(self, values: Arrays) -> list[np.ndarray]:
        """Returns the weights as they are; see `Encoding`."""
        self._own = values
        return list(values)

    def received(self, rank: int, parts: Arrays) -> None:
        """Keeps the neighbour's weights; see `Encoding`."""
        self._of[rank] = [
            part.view(value.dtype).reshape(value.shape) for part, value in zip(parts, self._own, strict=True)
        ]

    def change(self, weights: Mapping[int, float]) -> list[np.ndarray]:
        """Returns the weighted sum of the differences; see `Encoding`."""
        return [
            _weighted([self._of[rank][place] - value for rank in weights], list(weights.values()), value)
            for place, value in enumerate(self._own)
        ]


class Differences(Encoding):
    """An encoding that sends compressed differences from the weights that were sent before: CHOCO-SGD.

    A process and all its neighbours keep the same copy of its weights. In a round the process sends the compressed
    difference between its weights and that copy, and all add it to the copy. Then the process changes its weights by
    the differences between its neighbours' copies and its own, times a consensus rate. The coarser the compression, the
    smaller this rate, because copies lag behind.

    Args:
        schedules: schedule of the methods of each variable, by round; None sends its weights as they are.
        rate: consensus rate of the compressed variables; by default that of `suitable_rate`.
        rank: rank of this process, which seeds its random numbers.

    Raises:
        ValueError: a method cannot compress differences.

    References:
        Koloskova, Stich and Jaggi, *Decentralized stochastic optimization and gossip algorithms with compressed
            communication*, ICML 2019; Koloskova, Lin, Stich and Jaggi, *Decentralized deep learning with arbitrary
            communication compression*, ICLR 2020, algorithm 1.
    """

    def __init__(self, schedules: Sequence[Schedule | None], rate: float | None, rank: int) -> None:
        self._schedules, self._given, self._rank = schedules, rate, rank
        self._suited = differences.suited(schedules, "gossip")
        self._round = -1  # round of the last message sent; messages received are of the same round
        self._like: list[np.ndarray] = []
        self._states: list[State] = []
        self._rates: dict[tuple[Method, int], float] = {}
        self._copies: dict[int, list[np.ndarray]] = {}

    def begin(self, values: Arrays, ranks: Sequence[int]) -> None:
        """Resets all copies to the common weights; see `Encoding`."""
        self._copies = {rank: [differences.base(value) for value in values] for rank in (self._rank, *ranks)}
        if not self._states:
            self._states = [State(f"{place}", seed=self._rank, shape=array.shape) for place, array in enumerate(values)]

    def _method(self, place: int) -> Method | None:
        schedule = self._schedules[place]
        choice = None if schedule is None else schedule.at(self._round)
        return None if choice is None else self._suited[choice]

    def _rate(self, place: int) -> float:
        method, size = self._method(place), self._like[place].size
        if method is None:
            return 1.0
        if self._given is not None:
            return self._given
        if (method, size) not in self._rates:
            self._rates[method, size] = suitable_rate(method, self._like[place].shape)
        return self._rates[method, size]

    def sent(self, values: Arrays) -> list[np.ndarray]:
        """Returns payloads and uncompressed weights, preceded by a part that says which variables are uncompressed."""
        self._like = list(values)
        self._round += 1
        copies = self._copies[self._rank]
        payloads: list[np.ndarray | None] = []
        for place, value in enumerate(values):
            method = self._method(place)
            payload = None if method is None else differences.advance(method, value, copies[place], self._states[place])
            if payload is None:
                copies[place] = differences.base(value)
            payloads.append(payload)
        is_whole = np.array([payload is None for payload in payloads], np.uint8)
        return [is_whole, *(copies[place] if encoded is None else encoded for place, encoded in enumerate(payloads))]

    def received(self, rank: int, parts: Arrays) -> None:
        """Updates the copy of the neighbour's weights; see `Encoding`."""
        copies = self._copies[rank]
        for place, (is_whole, part) in enumerate(zip(parts[0].tolist(), parts[1:], strict=True)):
            method = self._method(place)
            if is_whole or method is None:
                copies[place] = np.array(part.view(copies[place].dtype))
            else:
                method.decode(part, copies[place], np.add)

    def change(self, weights: Mapping[int, float]) -> list[np.ndarray]:
        """Returns the weighted sum of the copies' differences, times the rate; see `Encoding`."""
        copies = self._copies[self._rank]
        changes = []
        for place, like in enumerate(self._like):
            rate = self._rate(place)
            others = [self._copies[rank][place] - copies[place] for rank in weights]
            total = _weighted(others, [rate * weight for weight in weights.values()], copies[place])
            changes.append(total.astype(like.dtype).reshape(like.shape))
        return changes


def suitable_rate(method: Method, shape: tuple[int, ...]) -> float:
    """Returns a consensus rate: 0.6 times the part of a normally distributed array that one encoding keeps.

    That part is 1 − ‖decoded − array‖² / ‖array‖², the δ of CHOCO-SGD's analysis. The rates of the analysis are far
    smaller than those that converge. On a ring of 8, rates above about twice this one diverge with `TopK`.

    Args:
        method: compression method that `tfdist.compression.differences.as_contraction` returned.
        shape: shape of the array.

    Returns:
        The rate; 1 if nearly everything is kept.
    """
    array = np.random.default_rng(0).normal(size=shape).reshape(-1)
    decoded = np.zeros_like(array)
    differences.advance(method, array, decoded, State("", shape=shape))
    arrives = 1 - float(np.sum((decoded - array) ** 2) / np.sum(array**2))
    return 1.0 if arrives > 0.95 else max(0.6 * arrives, 1e-3)


def _weighted(arrays: Sequence[np.ndarray], weights: Sequence[float], like: np.ndarray) -> np.ndarray:
    terms = [array * array.dtype.type(weight) for array, weight in zip(arrays, weights, strict=True)]
    return functools.reduce(np.add, terms) if terms else np.zeros_like(like)
