"""Names of snapshots, their order, and which of them are removed; contents are those of real files."""

import numpy as np
import pytest

from tfdist.parameter_server.protocol.state import ShardProgress
from tfdist.parameter_server.snapshots.file import save
from tfdist.parameter_server.snapshots.folder import (
    PARTIAL,
    file_name,
    remove_leftovers,
    remove_superseded,
    snapshots_of,
)
from tfdist.parameter_server.snapshots.state import PartState, ShardState


def put(folder, server, servers, number, rows, digest="model"):
    """Writes a snapshot of some of 12 rows."""
    parts = tuple(
        PartState(path, begin, end, 12, np.zeros((end - begin, 1), np.float32), {}) for path, begin, end in rows
    )
    path = folder / file_name(server, servers, number)
    with path.open("wb") as file:
        save(file, ShardState(digest, {}, {}, parts, ShardProgress(1)))
    return path


def test_snapshots_are_listed_newest_first(tmp_path):
    for server, servers, number in ((0, 2, 9), (0, 2, 10), (1, 2, 1_000_000_000), (2, 3, 2)):
        (tmp_path / file_name(server, servers, number)).touch()
    listed = [(file.server, file.servers, file.number) for file in snapshots_of(tmp_path)]
    assert listed == [(1, 2, 1_000_000_000), (0, 2, 10), (0, 2, 9), (2, 3, 2)]
    assert [file.path.name for file in snapshots_of(tmp_path)][1] == "server-0-of-2.000000010.npz"


def test_other_files_are_ignored(tmp_path):
    for name in (
        "server-0-of-2.npz",
        "server-0-of-2.1.npz.bak",
        "xserver-0-of-2.1.npz",
        f"server-0-of-2.1.npz{PARTIAL}",
    ):
        (tmp_path / name).touch()
    assert snapshots_of(tmp_path) == []
    assert snapshots_of(tmp_path / "missing") == []


def test_partial_files_of_a_server_are_removed(tmp_path):
    for server, servers in ((0, 2), (1, 2), (0, 3)):
        (tmp_path / f"{file_name(server, servers, 1)}{PARTIAL}").touch()
        (tmp_path / file_name(server, servers, 1)).touch()
    remove_leftovers(tmp_path, 0, 2)
    assert [path.name for path in tmp_path.glob(f"*{PARTIAL}")] == [f"{file_name(1, 2, 1)}{PARTIAL}"]
    assert len(snapshots_of(tmp_path)) == 3
    remove_leftovers(tmp_path / "missing", 0, 2)


@pytest.mark.parametrize(
    ("newer", "is_removed"),
    [
        ([[("w", 0, 8)]], False),
        ([[("w", 0, 8)]] * 2, True),
        ([[("w", 0, 12)], [("w", 0, 5)], [("w", 5, 9)]], True),
        ([[("w", 0, 12)], [("w", 0, 5)], [("w", 6, 9)]], False),
        ([[("w", 1, 8)]] * 4, False),
        ([[("w", 0, 7)]] * 4, False),
        ([[("v", 0, 8)]] * 4, False),
        ([[("w", 0, 4)], [("w", 4, 8)], [("w", 0, 6)], [("w", 6, 8)]], True),
    ],
)
def test_file_is_removed_when_newer_files_repeat_its_rows(tmp_path, newer, is_removed):
    old = put(tmp_path, 0, 1, 1, [("w", 0, 8)])
    later = [put(tmp_path, server, 7, 2, rows) for server, rows in enumerate(newer)]
    remove_superseded(tmp_path, 0, 7, keep=2)
    assert old.exists() is not is_removed
    assert all(path.exists() for path in later)


def test_older_files_and_other_models_supersede_nothing(tmp_path):
    put(tmp_path, 0, 2, 1, [("w", 0, 12)])
    old = put(tmp_path, 0, 1, 3, [("w", 0, 12)])
    put(tmp_path, 0, 2, 4, [("w", 0, 12)], digest="another")
    remove_superseded(tmp_path, 0, 2, keep=1)
    assert old.exists()
    put(tmp_path, 0, 2, 5, [("w", 0, 12)])
    remove_superseded(tmp_path, 0, 2, keep=1)
    assert not old.exists()


def test_unreadable_files_stay_and_supersede_nothing(tmp_path):
    old = put(tmp_path, 0, 1, 1, [("w", 0, 12)])
    damaged = tmp_path / file_name(1, 3, 2)
    damaged.write_bytes(b"PK")
    remove_superseded(tmp_path, 0, 2, keep=1)
    assert old.exists()
    put(tmp_path, 0, 2, 3, [("w", 0, 12)])
    remove_superseded(tmp_path, 0, 2, keep=1)
    assert not old.exists()
    assert damaged.exists()


def test_the_last_files_of_a_server_stay_without_being_opened(tmp_path):
    """Also those of a server without variables, which hold no rows."""
    paths = [put(tmp_path, 0, 2, number, []) for number in range(1, 5)]
    other = put(tmp_path, 1, 2, 1, [])
    remove_superseded(tmp_path, 0, 2, keep=2)
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert other.exists()
