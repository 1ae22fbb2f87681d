"""The shards of a server, one for each model that is trained; checks that all workers train the same models."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from tfdist.parameter_server.dealing.deals import Answer, DealerService
from tfdist.parameter_server.protocol.dealing import DealerMessage
from tfdist.parameter_server.protocol.messages import (
    Attach,
    CompareState,
    Inspect,
    LeaveModel,
    ReadModel,
    Refused,
    ServerReport,
)
from tfdist.parameter_server.protocol.programs import CHIEF, Programs
from tfdist.parameter_server.protocol.tables import TableMessage
from tfdist.parameter_server.shard.shard import Shard
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.tables.tables import Tables
from tfdist.parameter_server.worker.layer_states import LayerStateStore

_MODEL = re.compile(r"[\w-][\w. -]{0,199}")
"""A valid name of a model; it is also the name of the folder of its snapshots."""

Key = tuple[str, int]
"""Name of a model, and the number of earlier models of this name."""


class Shards:
    """All state of a server: shards, tables and the dealer, for one thread. It passes each message to its receiver.

    Args:
        make: function that makes the shard of a model, from its name and the number of earlier models of this name.
        tables: tables of the server.
        deals: dealer of the job's batches; None if another server has it.
        tasks: function that returns the names of all tasks, by number, for reports; the list may grow.
        servers: addresses of all servers, for reports.
        is_chief_there: function that returns whether the chief is in the job.
        chief: number of the worker whose models the others must have; None if it is not a worker of this server.

    Attributes:
        deals: dealer of the job's batches; None if another server has it.
        tables: tables of the server.
        peers: by connection, the worker and the model that it has attached for.
        programs: models that each worker has begun.
        states: the chief's weights that no server updates.
        gone_on: by model, the workers that have gone on to other optimizers for its variables.
        over: models that all workers have gone on from.
        absent: numbers of tasks that have ended or are lost.
    """

    def __init__(
        self,
        make: Callable[[str, int], Shard],
        tables: Tables | None = None,
        deals: DealerService | None = None,
        tasks: Callable[[], Sequence[str]] = tuple,
        servers: Sequence[str] = (),
        is_chief_there: Callable[[], bool] = lambda: True,
        chief: int | None = CHIEF,
    ) -> None:
        self._make = make
        self._chief = chief
        self._tasks = tasks
        self._servers = tuple(servers)
        self.deals = deals
        if deals is not None:
            deals.when_idle_changes = self._set_idle
            deals.when_left = self._absent
        self._shards: dict[Key, Shard] = {}
        self.peers: dict[bytes, tuple[int, Key]] = {}
        self.programs = Programs(chief)
        self.gone_on: dict[Key, set[int]] = {}
        self.over: set[Key] = set()
        self.absent: set[int] = set()
        self._astray: dict[bytes, str] = {}  # why the next message of a connection is refused
        self.states = LayerStateStore(is_chief_there)
        self.tables = tables or Tables()

    def __iter__(self) -> Iterator[Shard]:
        return iter(list(self._shards.values()))

    def __getitem__(self, key: Key) -> Shard:
        return self._shards[key]

    def models(self) -> list[Key]:
        """Returns the models that are trained."""
        return list(self._shards)

    def put(self, key: Key) -> Shard:
        """Makes a new shard for a model, in place of the one that it has, and returns it.

        Args:
            key: name and occurrence of the model.
        """
        self._shards[key] = made = self._make(*key)
        made.ledger.awaited -= self.absent
        made.tickets.deals = self.deals
        if self.deals is not None:
            made.set_idle(self.deals.idle)
        return made

    def heard(self, peer: bytes, message: Any, arrays: list[np.ndarray], answer: Answer) -> None:
        """Handles a message.

        Args:
            peer: identity of the connection that the message came over.
            message: message of a worker.
            arrays: the message's arrays; read-only views that do not change before the answer.
            answer: function that sends the answer; may be called later.
        """
        if isinstance(message, Inspect):
            models = tuple(shard.report(*key) for key, shard in self._shards.items())
            answer(ServerReport(message.id, models, tuple(self._tasks()), self._servers), ())
        elif isinstance(message, ReadModel):
            newest = max((key for key in self._shards if key[0] == message.model), default=None)
            if newest is None or (values := self._shards[newest].read(message)) is None:
                answer(Refused(message.id, f"this server has no model {message.model}", is_unknown=True), ())
            else:
                answer(*values)
        elif isinstance(message, CompareState):
            self.states.heard(message, arrays, answer)
        elif isinstance(message, TableMessage):
            self.tables.heard(message, arrays, answer)
        elif isinstance(message, DealerMessage):
            if self.deals is None:
                answer(Refused(message.id, "this server deals no batches"), ())
            else:
                self.deals.heard(message, arrays, answer)
        elif isinstance(message, Attach) and (refusal := self._attach(peer, message)) is not None:
            answer(refusal, ())
        elif peer not in self.peers:
            answer(Refused(message.id, "this connection has not attached", is_unknown=True), ())
        else:
            worker, key = self.peers[peer]
            if (why := self._astray.pop(peer, None)) is not None and not isinstance(message, LeaveModel):
                answer(Refused(message.id, why), ())
                return
            self._shards[key].heard(message, arrays, answer)
            if isinstance(message, LeaveModel):
                del self.peers[peer]
                if message.is_over:
                    self.gone_on.setdefault(key, set()).add(worker)
                    self._drop_if_over(key)

    def lost(self, worker: int) -> None:
        """Stops waiting for a worker that is lost or has ended.

        Args:
            worker: task number of the worker.
        """
        self.absent.add(worker)
        self.peers = {peer: known for peer, known in self.peers.items() if known[0] != worker}
        for key, shard in list(self._shards.items()):
            shard.lost(worker)
            self._drop_if_over(key)
        self.states.lost(worker)
        if self.deals is not None:
            self.deals.lost(worker)
        self.tables.lost(worker)

    def came(self, task: int) -> None:
        """Notes that a task has come, for the first time or again. Workers attach by themselves.

        Args:
            task: number of the task.
        """
        self.absent.discard(task)

    def keep_snapshots(self, make: Callable[[str, int], Snapshots]) -> None:
        """Keeps snapshots of the existing shards from now on.

        Args:
            make: function that makes a model's snapshots, from its name and the number of earlier models of this name.
        """
        for key, shard in self._shards.items():
            shard.snapshots = make(*key)

    def close(self) -> None:
        """Writes last snapshots of all shards and tables."""
        for shard_or_table in (*self, *self.tables):
            shard_or_table.close()

    def _set_idle(self, workers: frozenset[int]) -> None:
        for shard in self:
            shard.set_idle(workers)

    def _absent(self, worker: int) -> None:
        for shard in self:
            shard.absent(worker)

    def _attach(self, peer: bytes, message: Attach) -> Refused | None:
        """Finds or makes the shard of a model for a worker.

        Returns:
            A refusal with the reason; None if the worker is attached.
        """
        key = message.model, message.occurrence
        if not _MODEL.fullmatch(message.model):
            return Refused(message.id, "not a valid name of a model: use at most 200 letters, digits, spaces and _-.")
        if key in self.over:
            later = [number for name, number in self._shards if name == message.model and number > message.occurrence]
            return Refused(
                message.id,
                f"all other workers have finished training the model {message.model}",
                is_over=True,
                newest=max(later, default=None),
            )
        if (why := self._differs(message)) is not None:
            return Refused(message.id, why)
        if key not in self._shards:
            self.put(key)
        mine = message.worker, key
        self.peers = {other: known for other, known in self.peers.items() if known != mine}  # drops an old connection
        self.peers[peer] = mine
        self.gone_on.get(key, set()).discard(message.worker)
        return None

    def _differs(self, message: Attach) -> str | None:
        """Notes a worker's model, and returns how it differs from the chief's at the same place.

        If the worker is the chief, the workers whose models differ are refused.
        """
        self.programs.note(message)
        differences = self.programs.differences(message)
        if message.worker != self._chief:
            return differences[0][1] if differences else None
        for begun, why in differences:
            key = begun.model, begun.occurrence
            if not self._shards[key].refuse(begun.worker, why):
                self._astray |= {peer: why for peer, known in self.peers.items() if known == (begun.worker, key)}
        return None

    def _drop_if_over(self, key: Key) -> None:
        """Drops the shard of a model that the chief has gone on from and that no worker trains any more."""
        ledger, gone_on = self._shards[key].ledger, self.gone_on.get(key, set())
        has_chief = bool(gone_on) if self._chief is None else self._chief in gone_on
        if has_chief and not ledger.workers and not ledger.awaited:
            self._shards.pop(key).close()
            self.over.add(key)
            del self.gone_on[key]
