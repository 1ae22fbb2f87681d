"""The messages about batches that are dealt out; see `tfdist.parameter_server.protocol.messages` for the rest.

They do not belong to a model's shard: they need no `Attach`. All messages may arrive twice.
"""

from __future__ import annotations

from typing import Literal

from tfdist.parameter_server.protocol.wire import Message

Rule = Literal["sum", "mean", "max", "min", "first"]
"""How the values of a metric's variable are merged; "first" takes that of the worker with the lowest number."""


class DealerMessage(Message, frozen=True):
    """Base of what a worker says about the epochs of a call of `fit`.

    Attributes:
        worker: its task's number.
        incarnation: a random number of this call of `fit`.
    """

    id: int
    worker: int
    incarnation: int


class BeginEpoch(DealerMessage, frozen=True):
    """A worker takes part in an epoch whose batches are dealt to all workers. It need not have attached.

    Attributes:
        fit: how many such calls of `fit` this worker has made before.
        epoch: number of the epoch.
        samples: as of `tfdist.parameter_server.dealing.plan.Plan`.
        batch_size: as of `Plan`.
        seed: proposed for the order; None if samples are not shuffled.
        brings: whether this worker has the stream of the batches.
    """

    fit: int
    epoch: int
    samples: int | None
    batch_size: int
    seed: int | None
    brings: bool = False


class Bring(DealerMessage, frozen=True):
    """A batch of a stream for all workers, whose parts follow as arrays; `Brought` answers when there is room for more.

    Attributes:
        fit: as of `BeginEpoch`.
        epoch: as of `BeginEpoch`.
        number: of the batch in the epoch, from 0 on.
        is_end: whether the stream has ended, before this batch.
        failure: why it has ended; None without a failure.
    """

    fit: int
    epoch: int
    number: int
    is_end: bool = False
    failure: str | None = None


class Take(DealerMessage, frozen=True):
    """Asks for a batch.

    Attributes:
        fit: as of `BeginEpoch`.
        epoch: as of `BeginEpoch`.
        request: higher than that of all earlier ones.
        is_idle: whether the worker has told all servers that nobody has to wait for it. Otherwise it is told when it
            has to wait for a batch and has none.
    """

    fit: int
    epoch: int
    request: int
    is_idle: bool = False


class Skip(DealerMessage, frozen=True):
    """A batch was used up in a step that made no update: it counts as committed."""

    ticket: int


class LeaveEpoch(DealerMessage, frozen=True):
    """The worker takes no more batches in this call of `fit`: those that it has are dealt again."""

    id: int
    worker: int
    incarnation: int


class MergeMetrics(DealerMessage, frozen=True):
    """Asks for the state of metrics at the end of an epoch, over all workers; the worker's own follows in arrays.

    Attributes:
        fit: as of `BeginEpoch`.
        epoch: as of `BeginEpoch`.
        rules: how each array is merged.
    """

    fit: int
    epoch: int
    rules: tuple[Rule, ...]


class Planned(Message, frozen=True):
    """The worker takes part in the epoch.

    Attributes:
        seed: of its order, for all workers.
    """

    id: int
    seed: int | None


class Dealt(Message, frozen=True):
    """A batch; see `tfdist.parameter_server.dealing.dealer.Batch`; what a stream has brought follows in arrays."""

    id: int
    ticket: int
    start: int
    stop: int


class Brought(Message, frozen=True):
    """There is room for a batch.

    Attributes:
        wanted: number of the batch that has to come next; None if the epoch needs no more.
    """

    id: int
    wanted: int | None


class NoBatch(Message, frozen=True):
    """There is no batch for the worker.

    Attributes:
        is_over: whether the epoch is over. If not, the worker may ask again, after it has told all servers that nobody
            has to wait for it.
    """

    id: int
    is_over: bool


class Merged(Message, frozen=True):
    """The state of metrics over all workers, in arrays that follow."""

    id: int
