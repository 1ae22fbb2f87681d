"""The tables of a server: handles each message about a table and answers it. It uses no sockets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from tfdist.parameter_server.protocol.messages import Done, Refused, Waiting
from tfdist.parameter_server.protocol.tables import (
    AssignRows,
    AttachTable,
    ExportTable,
    Lookup,
    Rows,
    TableAttached,
    TableMessage,
    UpdateRows,
)
from tfdist.parameter_server.shard.shard import Answer
from tfdist.parameter_server.tables.round import Round, TableUpdatePart
from tfdist.parameter_server.tables.snapshots import TableSnapshots, TableState
from tfdist.parameter_server.tables.table import EmbeddingTable

log = logging.getLogger("tfdist")

_CHIEF = 0
_MOST_COLUMNS, _MOST_WORKERS = 1 << 20, 1 << 20
"""Limits of a table. A message that asks for more is malformed, and must not allocate memory."""


@dataclass
class Sender:
    """A worker's client of a table, as the server knows it.

    Attributes:
        incarnation: random number of the client.
        looked_up: sequence of its last lookup that used keys.
        updated: sequence of its last update.
        assigned: id of its last message that assigned rows.
    """

    incarnation: int
    looked_up: int = -1
    updated: int = -1
    assigned: int = -1


@dataclass
class ServedTable:
    """A table of the server, with its bookkeeping.

    Attributes:
        described: the message by which a worker made the table.
        table: the rows.
        optimizer: optimizer of the rows, serialized; None while no worker has set it.
        snapshots: snapshots of the table; None keeps none.
        senders: the workers' clients, by worker.
        sequences: by worker and incarnation, the sequence of the last update.
        is_restored: whether the table was made from a snapshot.
        round: the next update that workers make together; None if each gradient is an update.
    """

    described: AttachTable
    table: EmbeddingTable
    optimizer: dict[str, Any] | None
    snapshots: TableSnapshots | None = None
    senders: dict[int, Sender] = field(default_factory=dict)
    sequences: dict[tuple[int, int], int] = field(default_factory=dict)
    is_restored: bool = False
    round: Round | None = None

    def take_snapshot(self) -> None:
        """Writes a snapshot in the background."""
        if self.snapshots is not None:
            state = TableState(self.optimizer or {}, [self.table.state()], dict(self.sequences))
            self.snapshots.write(state, self.table.iterations)

    def close(self) -> None:
        """Writes a last snapshot, and waits until it is written."""
        if self.snapshots is not None:
            self.snapshots.wait()  # an earlier snapshot may still be being written
            self.take_snapshot()
            self.snapshots.wait()


class Tables:
    """All tables of a server, for one thread.

    Each gradient is an update of its own, made on arrival, unless workers update the table together: then their
    gradients wait for each other. A repeated update, known by worker, incarnation and sequence, counts once.

    Args:
        snapshots: function that makes the snapshots of a table from its name, or returns None to keep none. None
            keeps none for any table.

    Attributes:
        ended: numbers of workers that are lost or have ended.
    """

    def __init__(self, snapshots: Callable[[str], TableSnapshots | None] | None = None) -> None:
        self._snapshots = snapshots
        self._tables: dict[str, ServedTable] = {}
        self.ended: set[int] = set()

    def __iter__(self) -> Iterator[ServedTable]:
        return iter(list(self._tables.values()))

    def names(self) -> list[str]:
        """Returns the names of all tables."""
        return list(self._tables)

    def served(self, name: str) -> ServedTable:
        """Returns a table and its bookkeeping.

        Args:
            name: name of the table.
        """
        return self._tables[name]

    def put(self, served: ServedTable) -> None:
        """Adds a table, in place of another table of this name.

        Args:
            served: the table; nobody else changes it.
        """
        self._tables[served.described.table] = served

    def keep_snapshots(self) -> None:
        """Keeps snapshots of the existing tables from now on."""
        for name, served in self._tables.items():
            served.snapshots = None if self._snapshots is None else self._snapshots(name)

    def heard(self, message: TableMessage, arrays: list[np.ndarray], answer: Answer) -> None:
        """Handles a worker's message.

        Args:
            message: the message.
            arrays: the message's arrays; read-only views that do not change before the answer.
            answer: function that sends the answer; may be called later.
        """
        try:
            if isinstance(message, AttachTable):
                served = self._attach(message)
                answer(TableAttached(message.id, len(served.table)), ())
                return
            served_or_none = self._tables.get(message.table)
            sender = None if served_or_none is None else served_or_none.senders.get(message.worker)
            if served_or_none is None or sender is None or sender.incarnation != message.incarnation:
                why = f"worker {message.worker} has not described the table {message.table[:200]}"
                answer(Refused(message.id, why, is_unknown=True), ())
                return
            if isinstance(message, UpdateRows) and served_or_none.round is not None:
                self._update_together(served_or_none, served_or_none.round, sender, message, arrays, answer)
            else:
                answer(*_answered(served_or_none, sender, message, arrays))
        except Exception as error:  # Keras or NumPy refuse what the worker has sent
            answer(Refused(message.id, f"the table {message.table[:200]}: {error}"), ())

    def lost(self, worker: int) -> None:
        """Refuses updates that wait for a worker that is lost or has ended, now and later.

        Args:
            worker: task number of the worker.
        """
        self.ended.add(worker)
        for served in self:
            if served.round is not None and worker in served.round.awaited:
                self._refuse(served.round.take(), worker)

    def _update_together(
        self,
        served: ServedTable,
        round: Round,
        sender: Sender,
        message: UpdateRows,
        arrays: list[np.ndarray],
        answer: Answer,
    ) -> None:
        """Takes a worker's part of an update, and makes the update when all parts are there.

        Raises:
            TypeError: arrays have wrong dtypes.
            ValueError: the number or the shapes of the arrays are wrong, or there is no optimizer yet.
        """
        if message.sequence <= sender.updated:
            answer(Done(message.id, served.table.iterations), ())
            return
        keys, gradients = _checked_update(served, arrays)
        is_again = round.add(TableUpdatePart(message, keys, gradients, answer))
        if ended := sorted(self.ended.intersection(round.awaited)):
            self._refuse(round.take(), ended[0])
        elif not round.awaited:
            _update(served, round.take())
        elif is_again:
            answer(Waiting(message.id, round.awaited), ())

    def _refuse(self, parts: list[TableUpdatePart], ended: int) -> None:
        for part in parts:
            why = f"the table {part.message.table[:200]}: worker {ended} has ended without its part of this update"
            part.answer(Refused(part.message.id, why, ended=ended), ())

    def _attach(self, message: AttachTable) -> ServedTable:
        """Finds or makes the table that a worker describes, and registers the worker's client.

        Raises:
            ValueError: the description differs from that of the existing table, or is invalid.
        """
        served = self._tables.get(message.table)
        if served is None:
            served = self._tables[message.table] = self._made(message)
            served.take_snapshot()
        for name in ("dim", "dtype", "initial", "policy", "workers"):
            expected, given = getattr(served.described, name), getattr(message, name)
            if expected != given:
                raise ValueError(
                    f"expected {name} {expected}, as on worker {served.described.worker}; got {given}. Every task must "
                    "build the same layers in the same order, or give them names."
                )
        counts = message.worker == _CHIEF or served.optimizer is None
        if message.optimizer is not None and counts and _is_other(served.optimizer, message.optimizer):
            served.table.set_optimizer(deepcopy(message.optimizer))
            served.optimizer = message.optimizer
        sender = served.senders.get(message.worker)
        if sender is None or sender.incarnation != message.incarnation:
            updated = served.sequences.get((message.worker, message.incarnation), -1)
            served.senders[message.worker] = Sender(message.incarnation, updated=updated)
            self.ended.discard(message.worker)
            if served.round is not None:
                served.round.forget(message.worker)
        return served

    def _made(self, message: AttachTable) -> ServedTable:
        """Makes a table, from a snapshot if there is one."""
        snapshots = None if self._snapshots is None else self._snapshots(message.table)
        snapshot = None if snapshots is None else snapshots.find()
        if not (1 <= message.dim <= _MOST_COLUMNS and 0 <= message.workers <= _MOST_WORKERS):
            raise ValueError(
                f"{message.dim} columns, or {message.workers} workers that update together, are out of range"
            )
        known = message.optimizer if snapshot is None else snapshot.optimizer or None
        optimizer = deepcopy(known or placeholder())  # Keras changes the dictionary that it deserializes
        table = EmbeddingTable(message.dim, optimizer, message.initial, message.policy, message.dtype)
        together = Round(range(message.workers)) if message.workers else None
        served = ServedTable(message, table, known, snapshots, is_restored=snapshot is not None, round=together)
        if snapshots is not None and snapshot is not None:
            table.restore(snapshot.states, snapshots.server, snapshots.servers)
            served.sequences.update(snapshot.sequences)
            log.warning(
                "tfdist: parameter server %d goes on from snapshots of the table %s, with %d rows and %d updates.",
                snapshots.server,
                message.table,
                len(table),
                table.iterations,
            )
        return served


def _answered(
    served: ServedTable, sender: Sender, message: TableMessage, arrays: list[np.ndarray]
) -> tuple[Any, list[np.ndarray]]:
    """Handles a message about an existing table.

    Returns:
        The answer and its arrays.

    Raises:
        TypeError: arrays have wrong dtypes.
        ValueError: the number or the shapes of the arrays are wrong, or there is no optimizer yet.
    """
    table = served.table
    pulls = isinstance(message, UpdateRows) and message.pulls
    expected = 3 if pulls else {Lookup: 1, ExportTable: 0}.get(type(message), 2)
    if len(arrays) != expected:
        raise ValueError(f"{len(arrays)} arrays; expected {expected}")
    match message:
        case Lookup():
            is_use = message.create and message.sequence > sender.looked_up
            rows = table.lookup(arrays[0], is_use)
            if is_use:
                sender.looked_up = message.sequence
            return Rows(message.id, table.iterations), [rows]
        case UpdateRows():
            if message.sequence > sender.updated:
                keys, gradients = _checked_update(served, arrays[:2])
                if message.learning_rate is not None:
                    table.set_learning_rate(message.learning_rate)
                table.update(keys, gradients, message.create)
                sender.updated = served.sequences[message.worker, message.incarnation] = message.sequence
            if pulls:
                return Rows(message.id, table.iterations), [table.lookup(arrays[0][arrays[2]], create=False)]
        case AssignRows():
            _check_values(served, arrays[1])
            is_copy = message.id <= sender.assigned  # others may have made updates since
            # Not by iterations, which begin anew with an optimizer.
            if not is_copy and not (message.only_if_new and served.sequences):
                table.assign(arrays[0], arrays[1], is_whole=True)
            sender.assigned = max(sender.assigned, message.id)
        case ExportTable():
            return Rows(message.id, table.iterations), list(table.export())
    return Done(message.id, table.iterations), []


def _update(served: ServedTable, parts: list[TableUpdatePart]) -> None:
    """Makes one update from the parts of all workers, and answers them."""
    try:
        for part in parts:
            if part.message.learning_rate is not None:
                served.table.set_learning_rate(part.message.learning_rate)
        keys = np.concatenate([part.keys for part in parts])
        gradients = np.concatenate([part.gradients for part in parts])
        served.table.update(keys, gradients, any(part.message.create for part in parts))
    except Exception as error:  # Keras or NumPy refuse what a worker has sent
        for part in parts:
            part.answer(Refused(part.message.id, f"the table {part.message.table[:200]}: {error}"), ())
        return
    for part in parts:
        worker, incarnation, sequence = part.message.worker, part.message.incarnation, part.message.sequence
        served.senders[worker].updated = served.sequences[worker, incarnation] = sequence
        part.answer(Done(part.message.id, served.table.iterations), ())


def _checked_update(served: ServedTable, arrays: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys and gradients of an update.

    Raises:
        TypeError: arrays have wrong dtypes.
        ValueError: the number or the shapes of the arrays are wrong, or there is no optimizer yet.
    """
    if len(arrays) != 2:
        raise ValueError(f"{len(arrays)} arrays; expected 2")
    keys, gradients = arrays
    _check_values(served, gradients)
    served.table.check(keys, gradients)
    if served.optimizer is None:
        raise ValueError("no worker has told this server by which optimizer the rows are updated")
    return keys, gradients


def _check_values(served: ServedTable, values: np.ndarray) -> None:
    if values.dtype != served.described.dtype:
        raise TypeError(f"rows of dtype {values.dtype}; expected {served.described.dtype}")


def placeholder() -> dict[str, Any]:
    """Returns the optimizer of a table for which no worker has set one yet."""
    config: dict[str, Any] = keras.optimizers.serialize(keras.optimizers.SGD(0.0))
    return config


def _is_other(known: dict[str, Any] | None, optimizer: dict[str, Any]) -> bool:
    """Returns whether an optimizer differs from the known one in more than its name and a constant learning rate."""
    return known is None or _essence(known) != _essence(optimizer)


def _essence(optimizer: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    config = dict(optimizer.get("config") or {})
    config.pop("name", None)
    if not isinstance(config.get("learning_rate"), dict):
        config["learning_rate"] = None
    return optimizer.get("class_name"), config
