"""A table's snapshots: each server writes its rows, and any number of servers can read them.

The files are those of `tfdist.parameter_server.snapshots.sharded`, with one part for each server, ``0-of-2``
for example. Its value is the number of updates, and the arrays of `EmbeddingTable.state` are its slots.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.parameter_server.protocol.state import ShardProgress, rows_of_sequences, sequences_of_rows
from tfdist.parameter_server.snapshots import sharded
from tfdist.parameter_server.snapshots.folder import SnapshotName, snapshots_of
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.snapshots.sharded import PartState, ShardState, SnapshotError
from tfdist.parameter_server.tables.table import State

PREFIX = "table-"
"""Prefix of the names of tables' folders."""


@dataclass(frozen=True, eq=False)
class TableState:
    """The state of a table in a snapshot.

    Attributes:
        optimizer: optimizer of the rows, serialized by `keras.optimizers.serialize`; empty if no worker had set it.
        states: `EmbeddingTable.state` of each server that wrote the snapshot, or of this server alone.
        sequences: by worker and incarnation, the sequence of the last update that counted.
    """

    optimizer: dict[str, Any]
    states: list[State]
    sequences: dict[tuple[int, int], int]


class TableSnapshots:
    """One server's snapshots of one table.

    Args:
        folder: folder of the job's snapshots, which all servers use.
        table: name of the table.
        server: index of the server.
        servers: number of servers.
        seconds: seconds between two snapshots.

    Attributes:
        server: index of the server.
        servers: number of servers.
    """

    def __init__(self, folder: Path, table: str, server: int, servers: int, seconds: float) -> None:
        self._folder = folder / _folder_name(table)
        self._table = table
        self.server = server
        self.servers = servers
        self._kept = Snapshots(self._folder, server, servers, seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until the next snapshot is due."""
        return self._kept.seconds_left

    def find(self) -> TableState | None:
        """Returns the newest complete state, which all servers of a job have written; None without snapshots.

        Raises:
            SnapshotError: there are snapshots, but none is complete.
        """
        failure: SnapshotError | None = None
        files = snapshots_of(self._folder)
        for servers in dict.fromkeys(file.servers for file in files):
            if _is_interrupted(files, servers):
                continue
            wanted = [self.server] if servers == self.servers else range(servers)
            try:
                snapshot = sharded.read(
                    self._folder, self._table, [(_part(server, servers), 0, 1) for server in wanted]
                )
            except SnapshotError as error:
                failure = failure or error
                continue
            if snapshot is not None:
                return TableState(
                    snapshot.optimizer,
                    [part.slots for part in snapshot.parts],
                    sequences_of_rows(snapshot.progress.applied),
                )
        if failure is not None:
            raise failure
        return None

    def write(self, state: TableState, iterations: int) -> None:
        """Writes a snapshot in the background, unless nothing is new.

        Args:
            state: state of this server's rows; its arrays must not change later.
            iterations: number of updates of the table.
        """
        (arrays,) = state.states
        part = PartState(_part(self.server, self.servers), 0, 1, 1, np.array(iterations, np.int64), dict(arrays))
        progress = ShardProgress(iterations, applied=rows_of_sequences(state.sequences))
        self._kept.write(ShardState(self._table, state.optimizer, {}, (part,), progress))

    def wait(self) -> None:
        """Waits for the snapshot that is being written."""
        self._kept.wait()


def _is_interrupted(files: Sequence[SnapshotName], servers: int) -> bool:
    """Returns whether a job with another number of servers has written between the newest files of this number.

    Then the newest files are of two jobs: the later job was killed before all of its servers had written.
    """
    newest: dict[int, int] = {}
    for file in files:
        if file.servers == servers:
            newest[file.server] = max(file.number, newest.get(file.server, 0))
    first, last = min(newest.values()), max(newest.values())
    return any(file.servers != servers and first < file.number < last for file in files)


def _part(server: int, servers: int) -> str:
    return f"{server}-of-{servers}"


def _folder_name(table: str) -> str:
    """Returns the name of a table's folder. The name of the table may contain any characters."""
    digest = hashlib.blake2b(table.encode(), digest_size=4).hexdigest()
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9_-]', '_', table)[:60]}-{digest}"
