"""A running server's snapshots: read when it starts, and written in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfdist.parameter_server.protocol.state import HeldRows
from tfdist.parameter_server.snapshots import file, sharded
from tfdist.parameter_server.snapshots.folder import snapshots_of
from tfdist.parameter_server.snapshots.sharded import ShardState, SnapshotError

log = logging.getLogger("tfdist")


class Snapshots:
    """One server's snapshots of one model.

    Args:
        folder: folder of the model's snapshots, which all servers of the job use.
        server: index of the server.
        servers: number of servers.
        seconds: seconds between two snapshots.
    """

    def __init__(self, folder: Path, server: int, servers: int, seconds: float) -> None:
        self._folder = folder
        self._server = server
        self._servers = servers
        self._seconds = seconds
        self._due = time.monotonic() + seconds
        self._writer: threading.Thread | None = None
        self._written: Any = None

    @property
    def seconds_left(self) -> float:
        """Seconds until the next snapshot is due."""
        return max(0.0, self._due - time.monotonic())

    def find(self, digest: str, held: Sequence[HeldRows]) -> ShardState | None:
        """Returns the newest state of a server's part of a model, whichever servers have written it; None if none have.

        Args:
            digest: digest of the model's variables.
            held: descriptions of the server's part of the variables.

        Raises:
            SnapshotError: the snapshots cannot be read, are of another model, or lack rows.
        """
        state = sharded.read(self._folder, digest, [(part.path, part.begin, part.end) for part in held])
        if state is not None:
            log.warning(
                "tfdist: parameter server %d goes on from the snapshots in %s, with %d updates.",
                self._server,
                self._folder,
                state.progress.version,
            )
        return state

    @staticmethod
    def newest_deals(folder: Path) -> dict[str, Any] | None:
        """Returns the dealer's state from the newest snapshot of the first server, of any model; None if there is none.

        Args:
            folder: folder with one folder for each model.
        """
        snapshots = [
            snapshot for model in folder.glob("*/") for snapshot in snapshots_of(model) if snapshot.server == 0
        ]
        for snapshot in sorted(snapshots, key=lambda name: name.path.stat().st_mtime_ns, reverse=True):
            try:
                deals = file.describe(snapshot.path).deals
            except (SnapshotError, file.DamagedError, OSError) as error:
                log.warning("tfdist: the snapshot %s is skipped: %s", snapshot.path, error)
                continue
            if deals is not None:  # snapshots of tables have no dealer's state
                return deals
        return None

    def write(self, state: ShardState, mark: Any = None) -> None:
        """Writes a snapshot on a thread, unless nothing is new or the last one is still being written.

        Args:
            state: state to write; its arrays must not change later.
            mark: value that differs for each state; None takes the state's version.
        """
        self._due = time.monotonic() + self._seconds
        mark = state.progress.version if mark is None else mark
        if self._written == mark or (self._writer is not None and self._writer.is_alive()):
            return
        self._written = mark
        self._writer = threading.Thread(target=self._write, args=(state,), name="tfdist-snapshot")
        self._writer.start()

    def wait(self) -> None:
        """Waits for the snapshot that is being written."""
        if self._writer is not None:
            self._writer.join()

    def _write(self, state: ShardState) -> None:
        try:
            sharded.write(self._folder, self._server, self._servers, state)
        except SnapshotError as error:
            log.error("tfdist: %s", error)
