"""The messages about tables, the embeddings without a fixed size; see `messages.py` for the rest.

Tables do not belong to a model's shard: they need no `Attach`, and nobody waits for another worker because of them. All
messages may arrive twice.
"""

from __future__ import annotations

from typing import Any

from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.wire import Message


class TableMessage(Message, frozen=True):
    """Base of what a worker sends about a table.

    Attributes:
        worker: its task's number.
        incarnation: a random number of the worker's client of this table.
        table: its name.
    """

    id: int
    worker: int
    incarnation: int
    table: str


class AttachTable(TableMessage, frozen=True):
    """A worker describes a table. The first to do so makes it.

    Attributes:
        dim: number of columns.
        dtype: of the rows.
        initial: the first values of rows.
        policy: which keys get a row.
        optimizer: as `keras.optimizers.serialize` describes it; None if the worker does not know it yet. The first one
            counts; later the chief's, if it is another one.
        workers: how many workers update it together, numbered from 0: once in each step, by the sum of their
            gradients; 0 if each gradient is an update.
    """

    dim: int
    dtype: str
    initial: InitialRows
    policy: RowPolicy
    optimizer: dict[str, Any] | None = None
    workers: int = 0


class Lookup(TableMessage, frozen=True):
    """Asks for the rows of the keys that follow: int64 [n].

    Attributes:
        sequence: of the worker's lookups that use keys; each counts once.
        create: whether this is a use of the keys, which makes rows; True in training.
    """

    sequence: int
    create: bool


class UpdateRows(TableMessage, frozen=True):
    """Gradients of one step: keys int64 [n] and gradients [n, dim] follow, and then places int64 [m] if it pulls.

    Attributes:
        sequence: of the worker's updates; each counts once.
        learning_rate: the chief's; None from others, where a schedule sets it, and for an optimizer of the table's own.
        create: whether this is a use of the keys, as their lookup was none.
        pulls: whether to answer with rows: those of the keys at these places, after the update.
    """

    sequence: int
    learning_rate: float | None = None
    create: bool = False
    pulls: bool = False


class AssignRows(TableMessage, frozen=True):
    """The chief's program has loaded a table: this server's keys int64 [n] and their values [n, dim] follow.

    Attributes:
        only_if_new: whether to ignore them once the table was updated: the chief loads its first values, also if it
            was started again while the others train.
    """

    only_if_new: bool


class ExportTable(TableMessage, frozen=True):
    """Asks for all keys and values."""


class TableAttached(Message, frozen=True):
    """The server has the table.

    Attributes:
        rows: their number.
    """

    id: int
    rows: int


class Rows(Message, frozen=True):
    """Rows, in arrays that follow: the values [n, dim] of a lookup or an update, or keys and values of an export.

    Attributes:
        iterations: updates of the table.
    """

    id: int
    iterations: int
