"""Contributions of a process to meetings: changes of variables, uncompressed or compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfdist.compression import differences, policy
from tfdist.compression.method import Method
from tfdist.compression.policy import Policy
from tfdist.compression.state import State
from tfdist.quorum.exchange import MeetingExchange

STRATEGY = "QuorumStrategy"

Payloads = Sequence[np.ndarray]


@dataclass(frozen=True)
class Contribution:
    """Encoded changes of one process, which can be sent several times.

    Attributes:
        whole: uncompressed changes, one flat array for each dtype, with the indices of its variables.
        payload: compressed changes of all other variables, concatenated (uint8).
        methods: compression method of each compressed variable, by index.
    """

    whole: list[tuple[list[int], np.ndarray]]
    payload: np.ndarray
    methods: dict[int, Method]


class ContributionEncoder:
    """Encodes the changes of one process for the rounds of some variables.

    Error feedback adds what an encoding lacks to the next contribution.

    Args:
        paths: paths of the variables.
        shapes: shapes of the variables.
        chosen: policy by which the changes are compressed; None for no compression.
        task: number of this process, which seeds its random numbers.

    Raises:
        ValueError: a method cannot compress differences.
    """

    def __init__(
        self, paths: Sequence[str], shapes: Sequence[tuple[int, ...]], chosen: Policy | None, task: int
    ) -> None:
        self._shapes = list(shapes)
        self._schedules = [
            None if chosen is None else policy.chosen(chosen, path, shape)
            for path, shape in zip(paths, shapes, strict=True)
        ]
        self._suited = differences.suited(self._schedules, STRATEGY)
        self._states = [State(f"{place}", seed=task, shape=shape) for place, shape in enumerate(shapes)]
        self._before: list[dict[str, np.ndarray]] = []

    def encode(self, changes: Sequence[np.ndarray], round: int) -> Contribution:
        """Encodes the changes of one round.

        Args:
            changes: change of each variable.
            round: number of the round, by which schedules choose methods.
        """
        methods: dict[int, Method] = {}
        for place, schedule in enumerate(self._schedules):
            choice = None if schedule is None else schedule.at(round)
            if choice is not None:
                methods[place] = self._suited[choice]
        self._before = [{name: array.copy() for name, array in state.arrays.items()} for state in self._states]
        payloads = [method.encode(changes[place].reshape(-1), self._states[place]) for place, method in methods.items()]
        for place in methods:
            self._states[place].step += 1
        of_dtypes: dict[str, list[int]] = {}
        for place, change in enumerate(changes):
            if place not in methods:
                of_dtypes.setdefault(change.dtype.name, []).append(place)
        whole = [
            (places, np.concatenate([changes[place].reshape(-1) for place in places])) for places in of_dtypes.values()
        ]
        return Contribution(whole, _joined(payloads), methods)

    def take_back(self) -> None:
        """Undoes the last `encode`, whose contribution came too late for its round."""
        for state, arrays in zip(self._states, self._before, strict=True):
            state.arrays = arrays

    def mean(self, contribution: Contribution, exchange: MeetingExchange) -> list[np.ndarray]:
        """Returns the weighted mean of the changes of all partners in a meeting.

        Args:
            contribution: contribution of this process, with the same variables and methods as the others'.
            exchange: exchange of the meeting.

        Raises:
            AbortedError: the meeting is aborted.
        """
        means: dict[int, np.ndarray] = {}
        for number, (places, vector) in enumerate(contribution.whole):
            means.update(self._apart(places, exchange.mean(f"{number}", vector)))
        if contribution.methods:

            def decode(payload: np.ndarray) -> np.ndarray:
                parts = zip(contribution.methods.items(), _split_payloads(payload), strict=True)
                return np.concatenate([method.decode(part).astype(np.float64) for (_, method), part in parts])

            mean = exchange.mean_of_payloads("payloads", contribution.payload, decode)
            means.update(self._apart(list(contribution.methods), mean))
        return [means[place] for place in range(len(self._shapes))]

    def _apart(self, places: Sequence[int], vector: np.ndarray) -> dict[int, np.ndarray]:
        ends = np.cumsum([int(np.prod(self._shapes[place])) for place in places])[:-1]
        return {
            place: part.reshape(self._shapes[place]) for place, part in zip(places, np.split(vector, ends), strict=True)
        }


def _joined(payloads: Payloads) -> np.ndarray:
    """Concatenates payloads, preceded by their lengths."""
    if not payloads:
        return np.empty(0, np.uint8)
    lengths = np.array([payload.size for payload in payloads], np.int64)
    return np.concatenate([lengths.view(np.uint8), *payloads])


def _split_payloads(joined: np.ndarray) -> Payloads:
    """Splits an array of `_joined`. Lengths are read until they and the payloads that they describe fill the array."""
    count, total = 0, 0
    while total + 8 * count < joined.size:
        total += int(joined[8 * count : 8 * (count + 1)].view(np.int64)[0])
        count += 1
    ends = np.cumsum(joined[: 8 * count].copy().view(np.int64))[:-1]
    return np.split(joined[8 * count :], ends)
