"""A table's snapshots: each server writes its rows, and any number of servers read them again.

The files are those of `tfdist.parameter_server.snapshots.sharded`, with one part for each server, ``0-of-2``
for example. Its value is the number of updates, and the arrays of `Table.state` are its slots.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist.parameter_server.snapshots import sharded
from tfdist.parameter_server.snapshots.folder import SnapshotName, snapshots_of
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.snapshots.sharded import PartState, ShardState, SnapshotError
from tfdist.parameter_server.tables.table import State

PREFIX = "table-"
"""With which the names of tables' folders begin."""


@dataclass(frozen=True, eq=False)
class TableState:
    """What a snapshot has of a table.

    Attributes:
        optimizer: of the rows, as `keras.optimizers.serialize` describes it; empty if no worker had said it.
        states: `Table.state` of each server that has written it, or of this one alone.
        sequences: by worker and incarnation, the sequence of the last update that counted.
    """

    optimizer: dict[str, Any]
    states: list[State]
    sequences: dict[tuple[int, int], int]


class TableSnapshots:
    """Snapshots of one table by one server.

    Args:
        folder: of all servers and models of the job.
        table: its name.
        server: index of the server.
        servers: how many there are.
        seconds: between two snapshots.

    Attributes:
        server: as given.
        servers: as given.
    """

    def __init__(self, folder: Path, table: str, server: int, servers: int, seconds: float) -> None:
        self._folder = folder / _folder_name(table)
        self._table = table
        self.server = server
        self.servers = servers
        self._kept = Snapshots(self._folder, server, servers, seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds until the next one is due."""
        return self._kept.seconds_left

    def find(self) -> TableState | None:
        """The newest state that is whole: all servers of a job have written it.

        Raises:
            SnapshotError: there are snapshots, but none is whole.
        """
        failure: SnapshotError | None = None
        files = snapshots_of(self._folder)
        for servers in dict.fromkeys(file.servers for file in files):
            if _is_interrupted(files, servers):
                continue
            wanted = [self.server] if servers == self.servers else range(servers)
            try:
                found = sharded.read(self._folder, self._table, [(_part(one, servers), 0, 1) for one in wanted])
            except SnapshotError as error:
                failure = failure or error
                continue
            if found is not None:
                return TableState(found.optimizer, [part.slots for part in found.parts], found.sequences)
        if failure is not None:
            raise failure
        return None

    def write(self, state: TableState, iterations: int) -> None:
        """Writes a snapshot in the background, unless nothing is new.

        Args:
            state: of this server; its arrays stay as they are.
            iterations: updates of the table.
        """
        (arrays,) = state.states
        part = PartState(_part(self.server, self.servers), 0, 1, 1, np.array(iterations, np.int64), dict(arrays))
        self._kept.write(ShardState(self._table, iterations, state.optimizer, {}, (part,), {}, state.sequences))

    def wait(self) -> None:
        """Waits for the snapshot that is being written."""
        self._kept.wait()


def _is_interrupted(files: Sequence[SnapshotName], servers: int) -> bool:
    """Whether a job with another number of servers has written between the newest files of this number of servers.

    Then these are of two jobs: the later one was killed before all of its servers had written.
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
    """Of a table, whose name may be anything."""
    digest = hashlib.blake2b(table.encode(), digest_size=4).hexdigest()
    return f"{PREFIX}{re.sub(r'[^A-Za-z0-9_-]', '_', table)[:60]}-{digest}"
