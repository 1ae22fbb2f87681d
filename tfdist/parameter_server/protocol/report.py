"""What a server tells of its shards, for people to see."""

from __future__ import annotations

import msgspec


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker, as a shard knows it.

    Attributes:
        number: of its task.
        is_there: whether it is attached.
        is_active: whether others may wait for it; in rounds it need not be.
        clock: the number of steps that it has pushed; as far as the slowest where it came late.
        counted: its pushes that count.
        dropped: its pushes that were dropped.
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
        model: its name.
        occurrence: how many models of this name came before it.
        variables: of which it holds something.
        nbytes: of their values.
        version: updates that it has made.
        received: bytes of arrays from workers.
        sent: bytes of arrays to workers.
        staleness: how many pushes had which staleness.
        workers: by number.
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


def together(parts: list[ModelReport]) -> ModelReport:
    """The report of a whole model.

    Args:
        parts: of its shards; at least one.
    """
    workers = [
        WorkerReport(
            own[0].number,
            any(one.is_there for one in own),
            any(one.is_active for one in own),
            max(one.clock for one in own),
            max(one.counted for one in own),
            max(one.dropped for one in own),
            sum(one.waited for one in own),
        )
        for own in (
            [one for part in parts for one in part.workers if one.number == number]
            for number in sorted({one.number for part in parts for one in part.workers})
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
