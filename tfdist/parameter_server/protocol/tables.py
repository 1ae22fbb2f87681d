"""The messages about tables, which are embeddings without a fixed size; other messages are in `messages.py`.

Tables do not belong to a model's shard, and need no `Attach`. A worker waits for others only in an `UpdateRows` of a
table that workers update together. All messages may arrive twice.
"""

from __future__ import annotations

from typing import Any

from tfdist.parameter_server.options.initial_rows import InitialRows
from tfdist.parameter_server.options.row_policy import RowPolicy
from tfdist.parameter_server.protocol.wire import Message, WorkerMessage


class TableMessage(WorkerMessage, frozen=True):
    """Base of a worker's messages about a table, of which each client is a session.

    Attributes:
        table: name of the table.
    """

    table: str


class AttachTable(TableMessage, frozen=True):
    """Describes a table, which the first description makes; `TableAttached` answers.

    Attributes:
        dim: number of columns.
        dtype: name of the rows' dtype.
        initial: first values of rows.
        policy: policy that decides which keys get a row.
        optimizer: the optimizer, as `keras.optimizers.serialize` describes it; None if the worker does not know it yet.
            The first one counts, and later a different one of the chief.
        workers: number of workers, numbered from 0, that update the table together: once in each step, by the sum of
            their gradients; 0 if each gradient is an update.
    """

    dim: int
    dtype: str
    initial: InitialRows
    policy: RowPolicy
    optimizer: dict[str, Any] | None = None
    workers: int = 0


class Lookup(TableMessage, frozen=True):
    """Asks for the rows of the keys that follow, int64 [n]; `Rows` answers.

    Attributes:
        sequence: number of the lookup; one that arrives twice counts as one use of its keys.
        create: whether this is a use of the keys, which makes rows; True in training.
    """

    sequence: int
    create: bool


class UpdateRows(TableMessage, frozen=True):
    """Gradients of one step: keys int64 [n] and gradients [n, dim] follow, and then places int64 [m] if it pulls.

    Attributes:
        sequence: number of the update; one that arrives twice counts once.
        learning_rate: the chief's learning rate; None from other workers, where a schedule sets it, and if the table
            has an optimizer of its own.
        create: whether the update is also a use of the keys, because their lookup was not.
        pulls: whether the answer has rows: those of the keys at the places, after the update.
    """

    sequence: int
    learning_rate: float | None = None
    create: bool = False
    pulls: bool = False


class AssignRows(TableMessage, frozen=True):
    """Loads a table on behalf of the chief's program: this server's keys int64 [n] and their values [n, dim] follow.

    Attributes:
        only_if_new: whether the server ignores the message once the table was updated. The chief sets it for its first
            values, which it also loads if it is started again while others train.
    """

    only_if_new: bool


class ExportTable(TableMessage, frozen=True):
    """Asks for all keys and values; `Rows` answers."""


class TableAttached(Message, frozen=True):
    """Confirms that the server has the table.

    Attributes:
        rows: number of rows.
    """

    id: int
    rows: int


class Rows(Message, frozen=True):
    """Gives rows in arrays that follow: the values [n, dim] for a lookup or an update, or keys and values of an export.

    Attributes:
        iterations: number of updates of the table.
    """

    id: int
    iterations: int
