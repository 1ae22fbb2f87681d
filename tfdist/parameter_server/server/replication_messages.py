"""Messages between a leading server and its follower.

The leader sends a stream of entries, numbered from 0. An entry may arrive twice or be missing. The follower takes only
the next one in order, and acknowledges its number; the leader sends the others again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tfdist.parameter_server.protocol.gradients import Kind
from tfdist.parameter_server.protocol.messages import Decision
from tfdist.parameter_server.protocol.programs import Program
from tfdist.parameter_server.protocol.state import HeldRows, SequenceRows, ShardProgress
from tfdist.parameter_server.protocol.tables import AttachTable
from tfdist.parameter_server.protocol.wire import Codec, Message
from tfdist.parameter_server.server.shards import Key
from tfdist.parameter_server.shard.ledger import Gradient, Worker


class Entry(Message, frozen=True):
    """Base class of all entries.

    Attributes:
        stream: random number that identifies the stream.
        number: number of the entry in the stream.
    """

    stream: int
    number: int


class BeginStream(Entry, frozen=True):
    """The first entry: the follower drops its state. A follower with another leader's whole state ignores it."""


class StateComplete(Entry, frozen=True):
    """The entry after the whole state: the follower may take over from now on."""


class WorkerMessage(Entry, frozen=True):
    """Entry with a worker's message, whose frames follow as arrays of bytes.

    Attributes:
        peer: the leader's name of the connection that the message came over.
    """

    peer: bytes


class WorkerLost(Entry, frozen=True):
    """Entry that a worker is lost or has ended: nobody waits for it any more.

    Attributes:
        worker: task number of the worker.
    """

    worker: int


class TaskArrived(Entry, frozen=True):
    """Entry that a task has come, for the first time or again.

    Attributes:
        worker: number of the task.
    """

    worker: int


class PendingGradients(msgspec.Struct, frozen=True):
    """Gradients that wait to be applied; their arrays follow those of the state.

    Attributes:
        gradient: entry of the ledger for these gradients.
        incarnation: incarnation of the worker that pushed them.
        read: version of the parameters that they were computed at.
        ticket: ticket of the batch; None if the dealer did not deal it.
        kinds: kind of each variable's gradient.
    """

    gradient: Gradient
    incarnation: int
    read: int
    ticket: int | None
    kinds: tuple[Kind, ...]


class LedgerState(msgspec.Struct, frozen=True):
    """What a shard's ledger has besides `ShardProgress`; see `tfdist.parameter_server.shard.ledger.Ledger`."""

    awaited: tuple[int, ...]
    idle: tuple[int, ...]
    workers: dict[int, Worker]
    round: tuple[int, int]
    done: tuple[tuple[int, int], ...]
    dropped: dict[int, int]
    staleness: dict[int, int]


class ShardCopy(Entry, frozen=True):
    """A copy of a shard, followed by its arrays. It replaces the follower's own shard.

    Attributes:
        model: name of the model.
        occurrence: number of earlier models of this name.
        held: descriptions of the variables; empty if the shard has none yet.
        optimizer: the optimizer, serialized by `keras.saving.serialize_keras_object`.
        slots: for each variable, the names of its slots.
        scalars: names of the optimizer's scalars.
        progress: what was counted and applied.
        ledger: rest of the ledger.
        incarnations: by worker, its incarnation.
        sequences: worker, incarnation, and sequence of the last push that was counted.
        decisions: by worker, the sequence of its last committed push and the decision about it.
        puts: by worker, incarnation and id of its last `Put` message that was applied.
        waiting: gradients that wait to be applied, in order of arrival.
    """

    model: str
    occurrence: int
    held: tuple[HeldRows, ...]
    optimizer: dict[str, Any]
    slots: tuple[tuple[str, ...], ...]
    scalars: tuple[str, ...]
    progress: ShardProgress
    ledger: LedgerState
    incarnations: dict[int, int]
    sequences: SequenceRows
    decisions: dict[int, tuple[int, Decision]]
    puts: dict[int, tuple[int, int]]
    waiting: tuple[PendingGradients, ...]


class ProgramsCopy(Entry, frozen=True):
    """A copy of what workers have begun; attributes as in `tfdist.parameter_server.server.shards.Shards`."""

    peers: tuple[tuple[bytes, int, Key], ...]
    programs: dict[int, Program]
    gone_on: tuple[tuple[Key, tuple[int, ...]], ...]
    over: tuple[Key, ...]
    absent: tuple[int, ...]


class StatesCopy(Entry, frozen=True):
    """The chief's weights that no server updates; the arrays follow.

    Attributes:
        programs: by worker, the sets of such weights that it has compared.
        digests: by model, the digests of its weights.
        arrays: digests of the arrays that follow, in their order.
    """

    programs: dict[int, Program]
    digests: tuple[tuple[Key, tuple[bytes, ...]], ...]
    arrays: tuple[bytes, ...]


class TableCopy(Entry, frozen=True):
    """A copy of a table, followed by the arrays of `EmbeddingTable.state`. It replaces the follower's own table.

    Attributes:
        described: the message by which a worker made the table.
        optimizer: the table's optimizer, serialized; None while no worker has set it.
        names: names of the arrays.
        senders: worker, incarnation, and the sequences of its last lookup and its last update.
        sequences: worker, incarnation, and the sequence of its last update.
    """

    described: AttachTable
    optimizer: dict[str, Any] | None
    names: tuple[str, ...]
    senders: tuple[tuple[int, int, int, int], ...]
    sequences: SequenceRows


class DealsCopy(Entry, frozen=True):
    """A copy of the dealer's state.

    Attributes:
        state: result of `tfdist.parameter_server.dealing.deals.DealerService.state`.
        first_ticket: ticket of the next batch.
    """

    state: dict[str, Any]
    first_ticket: int


class Acknowledged(Message, frozen=True):
    """Acknowledgement of all entries up to one.

    Attributes:
        stream: random number that identifies the stream.
        number: number of the last entry; -1 for none.
    """

    stream: int
    number: int


FROM_LEADER = Codec(
    BeginStream
    | StateComplete
    | WorkerMessage
    | WorkerLost
    | TaskArrived
    | ProgramsCopy
    | StatesCopy
    | ShardCopy
    | TableCopy
    | DealsCopy
)
FROM_FOLLOWER = Codec(Acknowledged)
