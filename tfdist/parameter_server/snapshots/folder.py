"""The files of a folder of snapshots: their names and order, and which ones are not needed any more."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.parameter_server.snapshots.file import DamagedError, Metadata, describe
from tfdist.parameter_server.snapshots.state import SnapshotError

PARTIAL = ".partial"
"""The end of a file's name while it is written."""
_NAME = re.compile(rf"server-(\d+)-of-(\d+)\.(\d+)\.npz({re.escape(PARTIAL)})?")


@dataclass(frozen=True)
class SnapshotName:
    """A snapshot, by its name.

    Attributes:
        path: of the file.
        server: that has written it.
        servers: how many there were then.
        number: higher than those of all snapshots that were there when it was written.
    """

    path: Path
    server: int
    servers: int
    number: int


def file_name(server: int, servers: int, number: int) -> str:
    """The name of a snapshot; arguments as of `SnapshotName`."""
    return f"server-{server}-of-{servers}.{number:09d}.npz"


def snapshots_of(folder: Path) -> list[SnapshotName]:
    """The whole snapshots, newest first; none if there is no such folder.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted(_list(folder, is_partial=False), key=lambda file: file.number, reverse=True)


def remove_leftovers(folder: Path, server: int, servers: int) -> None:
    """Removes what killed writers have left: this server's own files, and those of jobs with other numbers of servers.

    Raises:
        OSError: a file cannot be removed.
    """
    for file in _list(folder, is_partial=True):
        if file.servers != servers or file.server == server:
            file.path.unlink(missing_ok=True)


def remove_superseded(folder: Path, server: int, servers: int, keep: int) -> None:
    """Removes this server's files, and those of other numbers of servers, if ``keep`` newer ones hold each of the rows.

    Files that cannot be described stay: they are damaged, of another release or of another user.

    Raises:
        OSError: a file cannot be removed.
    """
    files = snapshots_of(folder)
    own = [file for file in files if (file.server, file.servers) == (server, servers)]
    described: dict[SnapshotName, Metadata | None] = {}

    def metadata(file: SnapshotName) -> Metadata | None:
        if file not in described:
            try:
                described[file] = describe(file.path)
            except (DamagedError, SnapshotError):
                described[file] = None
        return described[file]

    def is_superseded(file: SnapshotName, others: Sequence[SnapshotName]) -> bool:
        if (old := metadata(file)) is None:
            return False
        held: dict[str, list[tuple[int, int]]] = {}
        for other in others:
            if other.number > file.number and (new := metadata(other)) is not None and new.digest == old.digest:
                for part in new.parts:
                    held.setdefault(part.path, []).append((part.begin, part.end))
        return all(_times_held(held.get(part.path, []), part.begin, part.end) >= keep for part in old.parts)

    for file in [*own[keep:], *(file for file in files if file.servers != servers)]:
        # Mostly this server's own files say enough, and those of the others need not be opened.
        if is_superseded(file, own) or is_superseded(file, files):
            file.path.unlink(missing_ok=True)


def _times_held(held: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """How many of some ranges hold a row of another range; of the row that the fewest hold."""
    bounds = sorted({begin, end, *(bound for rows in held for bound in rows if begin < bound < end)})
    counts = (sum(first <= low and high <= last for first, last in held) for low, high in itertools.pairwise(bounds))
    return min(counts, default=len(held))


def _list(folder: Path, is_partial: bool) -> list[SnapshotName]:
    try:
        names = [(path, _NAME.fullmatch(path.name)) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return [
        SnapshotName(path, int(match[1]), int(match[2]), int(match[3]))
        for path, match in names
        if match is not None and (match[4] is not None) == is_partial
    ]
