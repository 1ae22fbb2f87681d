"""Figures about an epoch on parameter servers, such as updates, staleness and bytes."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tfdist.strategies.server_abilities import UpdatesOnServers


@dataclass(frozen=True)
class Reading:
    """Counters of the servers for a model, at one time.

    Attributes:
        time: time of the reading, in seconds of the monotonic clock.
        updates: number of updates that were made.
        received: bytes of arrays from workers.
        sent: bytes of arrays to workers.
        dropped: number of pushes that were dropped.
        staleness: number of pushes, by their staleness.
        waited: seconds that workers have waited for others, by worker's number.
    """

    time: float
    updates: int = 0
    received: int = 0
    sent: int = 0
    dropped: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    waited: Counter[int] = field(default_factory=Counter)


def read(extended: UpdatesOnServers, model: Any) -> Reading:
    """Reads the counters of all servers for all optimizers of a model.

    Args:
        extended: the strategy's `extended`.
        model: a Keras model.
    """
    reports = [link.report() for link in extended.links(model)]
    staleness: Counter[int] = Counter()
    waited: Counter[int] = Counter()
    for report in reports:
        staleness.update(report.staleness)
        waited.update({worker.number: worker.waited for worker in report.workers})
    return Reading(
        time.monotonic(),
        sum(report.version for report in reports),
        sum(report.received for report in reports),
        sum(report.sent for report in reports),
        sum(worker.dropped for report in reports for worker in report.workers),
        staleness,
        waited,
    )


def figures(before: Reading, now: Reading) -> tuple[dict[str, float], Counter[int]]:
    """Computes the figures of the time between two readings.

    Returns:
        The figures by name, and the number of pushes by their staleness.
    """
    seconds = now.time - before.time
    staleness = now.staleness - before.staleness
    pushes = sum(staleness.values())
    waits = {number: now.waited[number] - before.waited[number] for number in now.waited}
    longest = max(waits, key=lambda number: waits[number], default=-1)
    return {
        "updates": float(max(0, now.updates - before.updates)),
        "updates_per_second": max(0, now.updates - before.updates) / seconds if seconds else 0.0,
        "staleness": sum(late * count for late, count in staleness.items()) / pushes if pushes else 0.0,
        "most_staleness": float(max(staleness, default=0)),
        "dropped": float(max(0, now.dropped - before.dropped)),
        "mib_received": max(0, now.received - before.received) / 2**20,
        "mib_sent": max(0, now.sent - before.sent) / 2**20,
        "longest_wait": max(0.0, waits.get(longest, 0.0)),
        "longest_wait_of": float(longest),
    }, staleness
