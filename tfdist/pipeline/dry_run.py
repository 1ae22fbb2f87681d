"""The dry run of a table, which finds deadlocks, idle time and memory before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tfdist.pipeline import picture
from tfdist.pipeline.actions import Action, ActionKind
from tfdist.pipeline.table import Table


@dataclass(frozen=True)
class TimelineSpan:
    """An action with its begin and end.

    Attributes:
        worker: number of the worker that did the action.
        action: the action.
        begin: begin of the action, counted from the beginning of the step.
        end: end of the action, counted from the beginning of the step.
    """

    worker: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """The times of each worker's actions in a step, from a dry run or a recording; printed as a picture.

    Attributes:
        spans: actions with their times, in order, for each worker.
    """

    spans: tuple[tuple[TimelineSpan, ...], ...]

    def __str__(self) -> str:
        return picture.summary(self)

    def draw(self, path: Any) -> None:
        """Draws the timeline with matplotlib.

        Args:
            path: path of the picture, such as ``"schedule.svg"``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        picture.draw(self, path)

    @property
    def seconds(self) -> float:
        """The length of the step, in seconds or the dry run's unit."""
        return max(span.end for row in self.spans for span in row)

    @property
    def idle_share(self) -> float:
        """The fraction of all workers' time that is spent waiting."""
        busy = sum(span.end - span.begin for row in self.spans for span in row)
        return 1 - busy / (self.seconds * len(self.spans))

    def kept(self, worker: int, weight: Callable[[int], float] = lambda stage: 1.0) -> float:
        """Returns the most that a worker keeps at once of results of forward passes, for backward passes.

        Args:
            worker: number of the worker.
            weight: returns what one micro-batch of a stage takes; 1 by default, which counts micro-batches.
        """
        now = most = 0.0
        for span in self.spans[worker]:
            if span.action.kind is ActionKind.FORWARD:
                now += weight(span.action.stage)
                most = max(most, now)
            elif span.action.kind is not ActionKind.INPUTS:
                now -= weight(span.action.stage)
        return most


class DeadlockError(ValueError):
    """Error for a table whose workers would wait for each other."""


def dry_run(
    table: Table, cost: Callable[[Action], float] = lambda action: 1.0, latency: float = 0.0
) -> PipelineTimeline:
    """Runs a table without computing anything.

    Args:
        table: the table to run.
        cost: returns how long an action takes, in seconds or any other unit.
        latency: time that a result takes from one worker to another, in the same unit.

    Raises:
        DeadlockError: workers wait for each other before all actions are done.
    """
    ends: dict[Action, float] = {}
    spans: list[list[TimelineSpan]] = [[] for _ in table.rows]
    free = [0.0] * len(table.rows)
    while True:
        moved = False
        for worker, row in enumerate(table.rows):
            while len(spans[worker]) < len(row):
                action = row[len(spans[worker])]
                needs = table.needs(action)
                if any(needed not in ends for needed in needs):
                    break
                ready = (ends[needed] + latency * (table.workers[needed.stage] != worker) for needed in needs)
                begin = max([free[worker], *ready])
                ends[action] = free[worker] = begin + cost(action)
                spans[worker].append(TimelineSpan(worker, action, begin, ends[action]))
                moved = True
        if not moved:
            break
    waiting = [
        (worker, row[len(done)], next(needed for needed in table.needs(row[len(done)]) if needed not in ends))
        for worker, (row, done) in enumerate(zip(table.rows, spans, strict=True))
        if len(done) < len(row)
    ]
    if waiting:
        reasons = "; ".join(
            f"worker {worker} cannot run {action} before {needed}" for worker, action, needed in waiting
        )
        raise DeadlockError(f"the table ends in a deadlock: {reasons}. Change the order of the actions.")
    return PipelineTimeline(tuple(map(tuple, spans)))
