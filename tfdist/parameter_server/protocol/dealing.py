"""The messages about batches that a dealer gives to workers; other messages are in `messages.py`.

They do not belong to a model's shard, and need no `Attach`. All messages may arrive twice.
"""

from __future__ import annotations

from typing import Literal

from tfdist.parameter_server.protocol.wire import Message, WorkerMessage

Rule = Literal["sum", "mean", "max", "min", "first"]
"""How the values of a metric's variable are merged; "first" takes the value of the worker with the lowest number."""


class DealerMessage(WorkerMessage, frozen=True):
    """Base of a worker's messages about the epochs of a call of `fit`, of which each is a session."""


class BeginEpoch(DealerMessage, frozen=True):
    """Says that a worker takes part in an epoch whose batches are dealt to all workers; `EpochPlanned` answers.

    Attributes:
        fit: number of calls of `fit` with dealt batches that this worker has made before.
        epoch: number of the epoch.
        samples: number of samples, or of whole batches; None for a stream (`dealing.plan.Plan`).
        batch_size: samples in each batch but the last; 1 if ``samples`` counts whole batches.
        seed: seed that the worker proposes for the order; None if samples are not shuffled.
        within_batches: whether samples are shuffled within each batch only.
        brings: whether this worker has the stream of the batches.
    """

    fit: int
    epoch: int
    samples: int | None
    batch_size: int
    seed: int | None
    within_batches: bool = False
    brings: bool = False


class BringBatch(DealerMessage, frozen=True):
    """Brings a batch of a stream, whose parts follow as arrays; `RoomForBatch` answers when there is room for more.

    Attributes:
        fit: number of the call of `fit`, as in `BeginEpoch`.
        epoch: number of the epoch.
        number: number of the batch in the epoch, from 0.
        is_end: whether the stream has ended before this batch.
        failure: error that has ended the stream; None without an error.
    """

    fit: int
    epoch: int
    number: int
    is_end: bool = False
    failure: str | None = None


class TakeBatch(DealerMessage, frozen=True):
    """Asks for a batch; `DealtBatch` or `NoBatch` answers.

    Attributes:
        fit: number of the call of `fit`, as in `BeginEpoch`.
        epoch: number of the epoch.
        request: number of the request, higher than those of all earlier ones.
        is_idle: whether the worker has told all servers that nobody has to wait for it. If not, the answer is `NoBatch`
            when the worker has no batch left and would have to wait for one.
    """

    fit: int
    epoch: int
    request: int
    is_idle: bool = False


class SkipBatch(DealerMessage, frozen=True):
    """Says that a batch was used in a step that made no update: it counts as committed."""

    ticket: int


class LeaveEpoch(DealerMessage, frozen=True):
    """Says that the worker takes no more batches in this call of `fit`: the batches that it has are dealt again."""


class MergeMetrics(DealerMessage, frozen=True):
    """Asks for the state of metrics over all workers at the end of an epoch; the worker's own state follows in arrays.

    Attributes:
        fit: number of the call of `fit`, as in `BeginEpoch`.
        epoch: number of the epoch.
        rules: how each array is merged.
        names: names of the metrics, which must be the same for all workers.
    """

    fit: int
    epoch: int
    rules: tuple[Rule, ...]
    names: tuple[str, ...] = ()


class EpochPlanned(Message, frozen=True):
    """Confirms that the worker takes part in the epoch.

    Attributes:
        seed: seed of the epoch's order, the same for all workers; None if samples are not shuffled.
    """

    id: int
    seed: int | None


class DealtBatch(Message, frozen=True):
    """Gives a worker a batch (`dealing.dealer.Batch`). If it is of a stream, its parts follow in arrays."""

    id: int
    ticket: int
    start: int
    stop: int


class RoomForBatch(Message, frozen=True):
    """Says that there is room for another batch of a stream.

    Attributes:
        wanted: number of the batch to bring next; None if the epoch needs no more.
    """

    id: int
    wanted: int | None


class NoBatch(Message, frozen=True):
    """Says that there is no batch for the worker now.

    Attributes:
        is_over: whether the epoch is over. If not, the worker may ask again, after it has told all servers that nobody
            has to wait for it.
    """

    id: int
    is_over: bool


class MergedMetrics(Message, frozen=True):
    """Gives the state of metrics over all workers, in arrays that follow."""

    id: int
