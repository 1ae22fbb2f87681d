"""Snapshots of parameter servers: each server writes its own files, and any number of servers can read them.

A snapshot is one file of one server, ``server-<k>-of-<n>.<number>.npz`` (`tfdist.parameter_server.snapshots.file`).
A file gets this name only when it is complete and on the disk, so a server may be killed at any moment. The number is
one more than the highest in the folder. It orders the snapshots of all servers, also of jobs with other numbers of
servers, without clocks and file times. All servers use the same folder.

Servers write independently of each other, so their snapshots are of different versions, as shards are in training.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from tfdist.parameter_server.protocol.state import rows_of_sequences
from tfdist.parameter_server.snapshots.file import DamagedError, Metadata, describe, load, save
from tfdist.parameter_server.snapshots.folder import (
    PARTIAL,
    SnapshotName,
    file_name,
    remove_leftovers,
    remove_superseded,
    snapshots_of,
)
from tfdist.parameter_server.snapshots.state import PartState, ShardState, SnapshotError, join

__all__ = ["PartState", "ShardState", "SnapshotError", "read", "write"]

log = logging.getLogger("tfdist")

Rows = tuple[str, int, int]
"""A variable's path, the first row, and the row behind the last one. A scalar has the rows 0 to 1."""


def write(folder: Path, server: int, servers: int, state: ShardState, keep: int = 2) -> Path:
    """Writes a snapshot, and removes the snapshots that it makes superfluous.

    A file is removed when each of its rows is in ``keep`` newer files. So each server has ``keep`` files, and one more
    while it writes. After a change of the number of servers the old files stay until the new servers have replaced
    them.

    Args:
        folder: folder of all servers of the job; made if it does not exist.
        server: index of the server; no other process writes for it.
        servers: number of servers.
        state: state to write; its arrays must not change meanwhile, and its paths are unique in the model.
        keep: number of snapshots to keep, at least 1; with 2, a damaged file costs only the updates since the one
            before.

    Returns:
        Path of the new file.

    Raises:
        SnapshotError: the folder cannot be written to. The snapshots in it are as before.
        TypeError: the state contains values that cannot be stored.
        ValueError: an argument is out of range, or a path occurs twice.
    """
    if keep < 1 or not 0 <= server < servers:
        raise ValueError(f"expected keep >= 1 and 0 <= server < servers; got {keep=}, {server=}, {servers=}")
    _check_unique(part.path for part in state.parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder, server, servers)
        number = 1 + max((file.number for file in snapshots_of(folder)), default=0)
        path = folder / file_name(server, servers, number)
        _write(path, state)
    except OSError as error:
        raise SnapshotError(
            f"the snapshot of parameter server {server} cannot be written to {folder}: {error.strerror}. Give a folder "
            "that all parameter servers can write to, with space for three times the model and its optimizer's slots."
        ) from error
    try:
        remove_superseded(folder, server, servers, keep)
    except OSError as error:
        log.warning("tfdist: old snapshots in %s cannot be removed: %s", folder, error)
    return path


def _write(path: Path, state: ShardState) -> None:
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            save(file, state)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    with contextlib.suppress(OSError):  # not every file system can sync a folder; then the name reaches the disk later
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(folder: Path, digest: str, wanted: Sequence[Rows]) -> ShardState | None:
    """Reads rows of variables from the newest snapshots that hold them, whichever servers have written them.

    Damaged files are skipped with a warning; older files then give the rows.

    If all rows come from one file, the state is exactly that of its server: all rows contain the same pushes, and
    ``progress.applied`` tells which. This holds for a server that is started again in an unchanged cluster, and for
    any number of servers that read the snapshot of a single server.

    Rows of several files may contain different pushes. Then

    - ``progress``, ``scalars`` and ``optimizer`` are those of the file with the lowest version, so that they fit each
      other: iterations count the updates that all rows contain, and some rows contain a few more.
    - The sequences of pushes are the highest of all files. So a repeated push is never applied twice to any row. A push
      that only some rows contain is lost for the others, like the pushes after a snapshot.

    Args:
        folder: folder of all servers of the job.
        digest: digest of the model's variables.
        wanted: rows of each variable, in the order of the returned parts. If empty, the newest file gives the rest.

    Returns:
        The state, without that of a dealer; None if there is no snapshot. Files of untrained servers (version 0) that
        do not cover all rows count as no snapshot: the job was killed as it began.

    Raises:
        SnapshotError: the snapshots are of another model, lack rows, or cannot be read.
        ValueError: a path occurs twice among the wanted variables.
    """
    _check_unique(path for path, _, _ in wanted)
    damaged: dict[Path, str] = {}
    while True:
        try:
            return _read(folder, digest, wanted, damaged)
        except DamagedError as error:
            damaged[error.path] = str(error)
            log.warning("tfdist: the snapshot %s cannot be read (%s); trying earlier ones", error.path, error)


@dataclass(frozen=True)
class _Piece:
    """Rows that are read from one part of a file."""

    file: SnapshotName
    part: int
    begin: int
    end: int


def _read(folder: Path, digest: str, wanted: Sequence[Rows], damaged: dict[Path, str]) -> ShardState | None:
    try:
        files = [file for file in snapshots_of(folder) if file.path not in damaged]
    except OSError as error:
        raise SnapshotError(
            f"the snapshots in {folder} cannot be read: {error.strerror}. Give a folder that all parameter servers can "
            "read and write."
        ) from error
    if not files and not damaged:
        return None
    gaps: list[list[tuple[int, int]]] = [[(begin, end)] for _, begin, end in wanted]
    pieces: list[list[_Piece]] = [[] for _ in wanted]
    used: dict[SnapshotName, Metadata] = {}
    newest = 0
    for file in files:
        if used and not any(gaps):
            break
        metadata = describe(file.path)
        newest = max(newest, metadata.progress.version)
        if metadata.digest != digest:
            raise SnapshotError(
                f"the snapshots in {folder} are of another model: {file.path.name} has the digest {metadata.digest}, "
                f"this model {digest}. Give another folder, or remove this one to train from the beginning."
            )
        places = {part.path: place for place, part in enumerate(metadata.parts)}
        for index, (path, _, _) in enumerate(wanted):
            if path in places and gaps[index]:
                part = metadata.parts[places[path]]
                overlaps, gaps[index] = _take(gaps[index], part.begin, part.end)
                pieces[index] += [_Piece(file, places[path], *rows) for rows in overlaps]
                if overlaps:
                    used[file] = metadata
        if not wanted:
            used[file] = metadata
    if any(gaps) or not used:
        if newest == 0 and not damaged:
            return None
        raise SnapshotError(_missing(folder, wanted, gaps, files, damaged))
    return _assembled(pieces, used)


def _take(gaps: list[tuple[int, int]], begin: int, end: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns the rows of the gaps that a part has, and the gaps that remain."""
    overlaps, left = [], []
    for first, last in gaps:
        low, high = max(first, begin), min(last, end)
        if low < high or first == last:  # equal for a variable without rows
            overlaps.append((low, high))
            left += [gap for gap in ((first, low), (high, last)) if gap[0] < gap[1]]
        else:
            left.append((first, last))
    return overlaps, left


def _assembled(pieces: list[list[_Piece]], used: dict[SnapshotName, Metadata]) -> ShardState:
    base = min(used, key=lambda file: (used[file].progress.version, -file.number))
    parts: list[list[PartState]] = [[] for _ in pieces]
    scalars: dict[str, np.ndarray] = {}
    for file in used:
        here = [(index, piece) for index, of_one in enumerate(pieces) for piece in of_one if piece.file == file]
        loaded, given = load(file.path, [(piece.part, piece.begin, piece.end) for _, piece in here], file == base)
        scalars |= given
        for (index, _), part in zip(here, loaded, strict=True):
            parts[index].append(part)
    whole = tuple(join(sorted(of_one, key=lambda part: part.begin)) for of_one in parts)
    applied: dict[tuple[int, int], int] = {}
    for metadata in used.values():
        for worker, incarnation, sequence in metadata.progress.applied:
            applied[worker, incarnation] = max(sequence, applied.get((worker, incarnation), sequence))
    oldest = used[base]
    progress = msgspec.structs.replace(oldest.progress, applied=rows_of_sequences(applied))
    return ShardState(oldest.digest, oldest.optimizer, scalars, whole, progress)


def _missing(
    folder: Path,
    wanted: Sequence[Rows],
    gaps: list[list[tuple[int, int]]],
    files: Sequence[SnapshotName],
    damaged: dict[Path, str],
) -> str:
    lacking = [
        f"{path} [{begin}:{end}]" for (path, _, _), rows in zip(wanted, gaps, strict=True) for begin, end in rows
    ]
    more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
    readable = sorted({f"server {file.server} of {file.servers}" for file in files})
    broken = f"; damaged: {', '.join(sorted(path.name for path in damaged))}" if damaged else ""
    return (
        f"the snapshots in {folder} lack rows of the model: {', '.join(lacking[:3]) or 'all'}{more}. Readable files: "
        f"{', '.join(readable) or 'none'}{broken}. All parameter servers must write to one folder, as on a shared file "
        "system: copy the missing files there, or remove the folder to train from the beginning."
    )


def _check_unique(paths: Iterable[str]) -> None:
    seen: set[str] = set()
    for path in paths:
        if path in seen:
            raise ValueError(f"two variables have the path {path!r}; snapshots need a different one for each variable")
        seen.add(path)
