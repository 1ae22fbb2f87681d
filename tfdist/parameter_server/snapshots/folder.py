"""The files of a folder of snapshots: their names, their order, and the removal of superfluous files."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist.parameter_server.snapshots.file import DamagedError, Metadata, describe
from tfdist.parameter_server.snapshots.state import SnapshotError

PARTIAL = ".partial"
"""Suffix of a file's name while it is written."""
_NAME = re.compile(rf"server-(\d+)-of-(\d+)\.(\d+)\.npz({re.escape(PARTIAL)})?")


@dataclass(frozen=True)
class SnapshotName:
    """A snapshot file, as described by its name.

    Attributes:
        path: path of the file.
        server: index of the server that wrote it.
        servers: number of servers at that time.
        number: number that is higher than those of all snapshots that existed when it was written.
    """

    path: Path
    server: int
    servers: int
    number: int


def file_name(server: int, servers: int, number: int) -> str:
    """Returns the file name of a snapshot; arguments as in `SnapshotName`."""
    return f"server-{server}-of-{servers}.{number:09d}.npz"


def snapshots_of(folder: Path) -> list[SnapshotName]:
    """Returns the complete snapshots of a folder, newest first; none if the folder does not exist.

    Raises:
        OSError: the folder cannot be read.
    """
    return sorted(_list(folder, is_partial=False), key=lambda file: file.number, reverse=True)


def remove_leftovers(folder: Path, server: int, servers: int) -> None:
    """Removes partial files of killed writers: this server's, and those of jobs with another number of servers.

    Raises:
        OSError: a file cannot be removed.
    """
    for file in _list(folder, is_partial=True):
        if file.servers != servers or file.server == server:
            file.path.unlink(missing_ok=True)


def remove_superseded(folder: Path, server: int, servers: int, keep: int) -> None:
    """Removes files of which ``keep`` newer files hold each row: this server's, and those of other numbers of servers.

    Files that cannot be described stay: they are damaged, or belong to another release or another user.

    Raises:
        OSError: a file cannot be removed.
    """
    files = snapshots_of(folder)
    own_files = [file for file in files if (file.server, file.servers) == (server, servers)]
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

    for file in [*own_files[keep:], *(file for file in files if file.servers != servers)]:
        # This server's own files mostly decide it, without opening the files of other servers.
        if is_superseded(file, own_files) or is_superseded(file, files):
            file.path.unlink(missing_ok=True)


def _times_held(held: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """Returns how many of some ranges hold a row from ``begin`` to ``end``, for the row that the fewest hold."""
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
