"""What a leading server sends to its follower, and what it answers.

The entries of a stream are numbered from 0 and follow each other. They may arrive twice, and some may be missing: the
follower takes the next one only, and says which one that was; the leader sends the others again.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tfdist.parameter_server.protocol.gradients import Kind
from tfdist.parameter_server.protocol.messages import Decision
from tfdist.parameter_server.protocol.programs import Program
from tfdist.parameter_server.protocol.state import Held
from tfdist.parameter_server.protocol.tables import AttachTable
from tfdist.parameter_server.protocol.wire import Codec, Message
from tfdist.parameter_server.server.shards import Key
from tfdist.parameter_server.shard.ledger import Gradient, Worker


class Entry(Message, frozen=True):
    """Base of all entries.

    Attributes:
        stream: a random number that the leader has given the stream.
        number: of the entry.
    """

    stream: int
    number: int


class Begin(Entry, frozen=True):
    """The first entry: the follower forgets what it has. With all of another leader's state it ignores this one."""


class Whole(Entry, frozen=True):
    """The follower has everything, and may take over from now on."""


class Heard(Entry, frozen=True):
    """A worker's message, whose frames follow as arrays of bytes.

    Attributes:
        peer: the leader's name of the connection that it came over.
    """

    peer: bytes


class Lost(Entry, frozen=True):
    """Nobody waits for a worker any more.

    Attributes:
        worker: its task's number.
    """

    worker: int


class Came(Entry, frozen=True):
    """A task is there, for the first time or again.

    Attributes:
        worker: its number.
    """

    worker: int


class Waiting(msgspec.Struct, frozen=True):
    """Gradients that wait to be applied; their arrays follow those of the state.

    Attributes:
        gradient: as of the ledger.
        incarnation: of their worker.
        read: version of the parameters that they are of.
        ticket: of the batch, if it was dealt.
        kinds: one for each variable.
    """

    gradient: Gradient
    incarnation: int
    read: int
    ticket: int | None
    kinds: tuple[Kind, ...]


class Books(msgspec.Struct, frozen=True):
    """The bookkeeping of a shard: attributes as of `tfdist.parameter_server.shard.ledger.Ledger`."""

    version: int
    awaited: tuple[int, ...]
    idle: tuple[int, ...]
    workers: dict[int, Worker]
    round: tuple[int, int]
    done: tuple[tuple[int, int], ...]
    counted: dict[int, int]
    dropped: dict[int, int]
    staleness: dict[int, int]


class ShardCopy(Entry, frozen=True):
    """A shard, followed by its arrays: the follower puts it in the place of its own.

    Attributes:
        model: name of its model, as of `Attach`.
        occurrence: as of `Attach`.
        held: describes its variables; empty if it has none yet.
        optimizer: as of `Create`.
        slots: as of `Create`.
        scalars: as of `Create`.
        books: the ledger's.
        incarnations: by worker.
        sequences: worker, incarnation and sequence of the last push that was counted.
        applied: likewise, of the last push that was applied.
        decisions: by worker, the sequence of a push and what became of it.
        waiting: gradients, in their order.
    """

    model: str
    occurrence: int
    held: tuple[Held, ...]
    optimizer: dict[str, Any]
    slots: tuple[tuple[str, ...], ...]
    scalars: tuple[str, ...]
    books: Books
    incarnations: dict[int, int]
    sequences: tuple[tuple[int, int, int], ...]
    applied: tuple[tuple[int, int, int], ...]
    decisions: dict[int, tuple[int, Decision]]
    waiting: tuple[Waiting, ...]


class ProgramsCopy(Entry, frozen=True):
    """What workers have begun: attributes as of `tfdist.parameter_server.server.shards.Shards`."""

    peers: tuple[tuple[bytes, int, Key], ...]
    programs: dict[int, Program]
    gone_on: tuple[tuple[Key, tuple[int, ...]], ...]
    over: tuple[Key, ...]
    absent: tuple[int, ...]


class StatesCopy(Entry, frozen=True):
    """The chief's weights that no server updates, which follow in the order of their digests.

    Attributes:
        programs: as of `tfdist.parameter_server.worker.layer_states.LayerStates`.
        digests: by model, those of its weights.
        arrays: the digests of those that follow.
    """

    programs: dict[int, Program]
    digests: tuple[tuple[Key, tuple[bytes, ...]], ...]
    arrays: tuple[bytes, ...]


class TableCopy(Entry, frozen=True):
    """A table, followed by the arrays of `Table.state`: the follower puts it in the place of its own.

    Attributes:
        described: the message that has made it.
        optimizer: of it; None while no worker has said it.
        names: of the arrays.
        senders: worker, incarnation, and the sequences of its last lookup and of its last update.
        sequences: worker, incarnation and the sequence of its last update.
    """

    described: AttachTable
    optimizer: dict[str, Any] | None
    names: tuple[str, ...]
    senders: tuple[tuple[int, int, int, int], ...]
    sequences: tuple[tuple[int, int, int], ...]


class DealsCopy(Entry, frozen=True):
    """The dealer's books.

    Attributes:
        state: as of `tfdist.parameter_server.dealing.deals.Deals.state`.
        first_ticket: of the next batch.
    """

    state: dict[str, Any]
    first_ticket: int


class Noted(Message, frozen=True):
    """The follower has all entries up to one.

    Attributes:
        stream: of the entries.
        number: of the last one; -1 for none.
    """

    stream: int
    number: int


FROM_LEADER = Codec(Begin | Whole | Heard | Lost | Came | ProgramsCopy | StatesCopy | ShardCopy | TableCopy | DealsCopy)
FROM_FOLLOWER = Codec(Noted)
