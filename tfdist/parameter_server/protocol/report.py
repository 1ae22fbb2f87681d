"""Reports of a server about its shards, for people to read."""

from __future__ import annotations

import msgspec


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker, as a shard knows it.

    Attributes:
        number: number of the worker's task.
        is_there: whether the worker is attached.
        is_active: whether others may wait for it; where there are rounds, the same as ``is_there``.
        clock: number of steps that it has pushed; a worker that comes late begins with the clock of the slowest.
        counted: number of its pushes that count.
        dropped: number of its pushes that were dropped.
        waited: seconds that its answers have waited for other workers.
    """

    number: int
    is_there: bool
    is_active: bool
    clock: int
    counted: int
    dropped: int
    waited: float


class ModelReport(msgspec.Struct, frozen=True):
    """A server's shard of a model.

    Attributes:
        model: name of the model.
        occurrence: number of models of this name that came before it.
        variables: number of variables of which the shard holds rows.
        nbytes: bytes of their values.
        version: number of updates that the shard has made.
        received: bytes of arrays from workers.
        sent: bytes of arrays to workers.
        staleness: number of pushes, by their staleness.
        workers: report of each worker, in the order of their numbers.
    """

    model: str
    occurrence: int
    variables: int
    nbytes: int
    version: int
    received: int
    sent: int
    staleness: dict[int, int]
    workers: tuple[WorkerReport, ...]


def merge_reports(parts: list[ModelReport]) -> ModelReport:
    """Joins the reports of a model's shards into one.

    Args:
        parts: reports of the shards; at least one.
    """
    workers = [
        WorkerReport(
            reports[0].number,
            any(report.is_there for report in reports),
            any(report.is_active for report in reports),
            max(report.clock for report in reports),
            max(report.counted for report in reports),
            max(report.dropped for report in reports),
            sum(report.waited for report in reports),
        )
        for reports in (
            [report for part in parts for report in part.workers if report.number == number]
            for number in sorted({report.number for part in parts for report in part.workers})
        )
    ]
    newest = max(parts, key=lambda part: sum(part.staleness.values()))
    return msgspec.structs.replace(
        newest,
        variables=sum(part.variables for part in parts),
        nbytes=sum(part.nbytes for part in parts),
        received=sum(part.received for part in parts),
        sent=sum(part.sent for part in parts),
        version=max(part.version for part in parts),
        workers=tuple(workers),
    )
