"""Merges metrics of an epoch over all workers that were dealt its batches. It uses no sockets."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tfdist.parameter_server.dealing.plan import EpochKey
from tfdist.parameter_server.protocol.dealing import MergedMetrics, MergeMetrics
from tfdist.parameter_server.protocol.messages import Refused, Waiting

Answer = Callable[[Any, Sequence[np.ndarray]], None]

_KEPT = 16
"""Number of epochs whose results are kept, for workers that come late."""


@dataclass
class _Parts:
    """The metrics that workers have given so far for one epoch.

    Attributes:
        given: by worker, its message and arrays.
        answers: by worker, the function that sends it the result.
    """

    given: dict[int, tuple[MergeMetrics, list[np.ndarray]]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)


class Merging:
    """A merger of the metrics that workers give at the end of an epoch, for one thread.

    Args:
        workers: function that returns the live workers that take part in an epoch.
    """

    def __init__(self, workers: Callable[[EpochKey], frozenset[int]]) -> None:
        self._workers = workers
        self._epochs: dict[EpochKey, _Parts] = {}
        self._results: OrderedDict[EpochKey, tuple[tuple[str, ...], list[np.ndarray]]] = OrderedDict()

    def heard(self, message: MergeMetrics, arrays: Sequence[np.ndarray], answer: Answer) -> None:
        """Takes a worker's metrics, and answers when those of all workers are there.

        Args:
            message: message of a worker that takes part in the epoch.
            arrays: the message's arrays.
            answer: function that sends the answer; may be called later.
        """
        key = message.fit, message.epoch
        if len(arrays) != len(message.rules):
            answer(Refused(message.id, f"{len(arrays)} arrays of metrics for {len(message.rules)} rules"), ())
            return
        if key in self._results:
            rules, merged = self._results[key]
            answer(MergedMetrics(message.id), merged if rules == message.rules else arrays)
            return
        parts = self._epochs.setdefault(key, _Parts())
        first = next(iter(parts.given.values()), (message, arrays))
        if (why := _difference(first[0], first[1], message, arrays)) is not None:
            answer(Refused(message.id, why), ())
            return
        parts.given[message.worker] = message, [array.copy() for array in arrays]
        parts.answers[message.worker] = answer
        self.settle()
        if key in self._epochs:
            answer(Waiting(message.id, self._awaited(key)), ())

    def settle(self) -> None:
        """Answers for epochs whose metrics are complete; this may also be because a missing worker is lost."""
        for key in [key for key in self._epochs if not self._awaited(key)]:
            parts = self._epochs.pop(key)
            ordered = [parts.given[worker] for worker in sorted(parts.given)]
            rules = ordered[0][0].rules
            merged = [_merged(rule, [arrays[place] for _, arrays in ordered]) for place, rule in enumerate(rules)]
            self._results[key] = rules, merged
            while len(self._results) > _KEPT:
                self._results.popitem(last=False)
            for worker, (message, _) in parts.given.items():
                parts.answers[worker](MergedMetrics(message.id), merged)

    def _awaited(self, key: EpochKey) -> tuple[int, ...]:
        return tuple(sorted(self._workers(key) - self._epochs[key].given.keys()))


def _difference(
    first: MergeMetrics, of_first: Sequence[np.ndarray], message: MergeMetrics, arrays: Sequence[np.ndarray]
) -> str | None:
    """Returns how a worker's metrics differ from those of the first worker; None if they do not."""
    described = [
        [
            *metrics.names,
            *(f"{rule} {array.dtype.name} {array.shape}" for rule, array in zip(metrics.rules, values, strict=True)),
        ]
        for metrics, values in ((first, of_first), (message, arrays))
    ]
    if described[0] == described[1]:
        return None
    return (
        f"worker {message.worker} has the metrics {', '.join(described[1])[:200]}, and worker {first.worker} has "
        f"{', '.join(described[0])[:200]}. Compile the model with the same metrics on every task."
    )


def _merged(rule: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the value of a metric's variable over all workers, as an array of the same dtype."""
    if rule == "first":
        return arrays[0]
    combined = {"max": np.maximum, "min": np.minimum}.get(rule, np.add).reduce(np.stack(arrays), axis=0)
    return np.asarray(combined / len(arrays) if rule == "mean" else combined).astype(arrays[0].dtype)
