"""Snapshots, written and read by servers of known states: any numbers of servers, damage, kills, and other models."""

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.parameter_server.snapshots.states import DIGEST, assert_same, assert_same_parts, parts_of, rows_of, shard
from tfdist.errors import TfdistError
from tfdist.parameter_server.protocol.state import ShardProgress, sequences_of_rows
from tfdist.parameter_server.snapshots.sharded import PartState, ShardState, SnapshotError, read, write


def write_all(folder, servers, version=7, **arguments):
    return [write(folder, server, servers, shard(server, servers, version), **arguments) for server in range(servers)]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def small(version, path="w", begin=0, end=4, rows=4, **slots):
    """A state of one variable, whose value is the version."""
    value = np.full((end - begin, 2), version, np.float32)
    return ShardState(DIGEST, {}, {}, (PartState(path, begin, end, rows, value, slots),), ShardProgress(version))


# Any number of servers.


@pytest.mark.parametrize(("writers", "readers"), itertools.product((1, 2, 3), repeat=2))
def test_any_number_of_servers_reads_all_snapshots(tmp_path, writers, readers):
    write_all(tmp_path, writers)
    for server in range(readers):
        state = read(tmp_path, DIGEST, rows_of(server, readers))
        assert_same(state, shard(server, readers))
        for part in state.parts:
            assert part.value.flags.writeable
            assert part.value.flags.owndata or part.value.base.flags.owndata, "no view of what was read beyond it"


def test_reading_without_snapshots_returns_none(tmp_path):
    assert read(tmp_path / "missing", DIGEST, [("w", 0, 4)]) is None
    (tmp_path / "weights.npz").write_bytes(b"of somebody else")
    (tmp_path / "server-0-of-1.000000001.npz.partial").write_bytes(b"of a killed server")
    assert read(tmp_path, DIGEST, [("w", 0, 4)]) is None


def test_each_server_gets_its_own_state_back_exactly(tmp_path):
    """Servers are of different versions, and have counted different pushes."""
    states = [
        shard(server, 3, 10 + server, counted={0: server}, sequences={(0, 5): server, (server, 6): 2 * server})
        for server in range(3)
    ]
    for server in (2, 0, 1, 0):
        write(tmp_path, server, 3, states[server])
    for server in range(3):
        assert_same(read(tmp_path, DIGEST, rows_of(server, 3)), states[server])


def test_a_single_servers_snapshot_is_exact_for_any_number(tmp_path):
    write(tmp_path, 0, 1, shard(0, 1, 9, counted={0: 4, 1: 5}, sequences={(0, 5): 3, (1, 6): 4}))
    for server in range(3):
        state = read(tmp_path, DIGEST, rows_of(server, 3))
        assert state.progress == ShardProgress(9, {0: 4, 1: 5}, ((0, 5, 3), (1, 6, 4)), 3)


def test_joined_rows_have_the_assignment_of_the_lowest_version(tmp_path):
    write(tmp_path, 0, 2, shard(0, 2, 12, assigned=12))
    write(tmp_path, 1, 2, shard(1, 2, 10, assigned=8))
    assert read(tmp_path, DIGEST, rows_of(0, 1)).progress.assigned == 8


def test_joined_rows_have_lowest_version_and_highest_sequences(tmp_path):
    """So that iterations fit the version, and a push that comes again is not applied twice to any row."""
    write(tmp_path, 0, 2, shard(0, 2, 12, counted={0: 7, 1: 5}, sequences={(0, 5): 6, (1, 8): 4}))
    write(tmp_path, 1, 2, shard(1, 2, 10, counted={0: 4, 1: 6}, sequences={(0, 5): 3, (1, 8): 5, (2, 9): 0}))
    state = read(tmp_path, DIGEST, rows_of(0, 1))
    assert state.progress.version == state.scalars["iterations"] == 10
    assert state.scalars["learning_rate"] == np.float32(1 / 11)
    assert state.progress.counted == {0: 4, 1: 6}
    assert sequences_of_rows(state.progress.applied) == {(0, 5): 6, (1, 8): 5, (2, 9): 0}
    first = {path: (begin, end) for path, begin, end in rows_of(0, 2)}
    for part in state.parts:
        begin, end = first.get(part.path, (0, 0))
        for low, high, version in ((begin, end, 12), (end, part.rows, 10)):
            if low < high:
                [expected] = parts_of(version, [(part.path, low, high)])
                np.testing.assert_array_equal(part.value[low:high] if part.value.ndim else part.value, expected.value)
                if part.value.shape == part.slots["momentum"].shape and part.value.ndim:
                    np.testing.assert_array_equal(part.slots["momentum"][low:high], expected.slots["momentum"])


def test_the_newest_rows_count_even_if_their_version_is_lower(tmp_path):
    """A job with three servers ends; one with two goes on from the lowest version, and is killed after one snapshot."""
    write_all(tmp_path, 3, 20)
    write(tmp_path, 0, 2, shard(0, 2, 15))
    assert_same(read(tmp_path, DIGEST, rows_of(0, 2)), shard(0, 2, 15))
    assert_same(read(tmp_path, DIGEST, rows_of(1, 2)), shard(1, 2, 20))
    whole = read(tmp_path, DIGEST, rows_of(0, 1))
    assert whole.progress.version == 15
    [embedding] = [part for part in whole.parts if part.path == "embedding/embeddings"]
    [new], [old] = (list(parts_of(version, [(embedding.path, 0, 40_000)])) for version in (15, 20))
    np.testing.assert_array_equal(embedding.value[:20_000], new.value[:20_000])
    np.testing.assert_array_equal(embedding.value[20_000:], old.value[20_000:])


def test_times_of_files_do_not_matter(tmp_path):
    """As after a copy, or with clocks that differ."""
    for version in (3, 4):
        path = write(tmp_path, 0, 1, shard(0, 1, version))
        os.utime(path, (1e9 - version, 1e9 - version))
    assert read(tmp_path, DIGEST, rows_of(0, 1)).progress.version == 4


def test_server_without_variables_is_restored(tmp_path):
    """Where there are more servers than variables."""
    empty = ShardState(DIGEST, {}, {"iterations": np.array(3)}, (), ShardProgress(3, {0: 3}, ((0, 5, 2),)))
    write(tmp_path, 0, 2, small(3))
    write(tmp_path, 1, 2, empty)
    assert_same(read(tmp_path, DIGEST, []), empty)
    assert read(tmp_path, DIGEST, [("w", 0, 4)]).progress.version == 3


def test_variable_without_rows_is_restored(tmp_path):
    write(tmp_path, 0, 1, small(3, begin=0, end=0, rows=0, momentum=np.zeros((0, 2), np.float32)))
    [part] = read(tmp_path, DIGEST, [("w", 0, 0)]).parts
    assert part.value.shape == part.slots["momentum"].shape == (0, 2)


def test_reading_during_writes_finds_whole_snapshots(tmp_path):
    """Files are removed between the listing of the folder and the reading of a file."""

    def serve(server):
        for version in range(2, 40):
            write(tmp_path, server, 2, small(version, begin=2 * server, end=2 * server + 2), keep=1)

    for server in range(2):
        write(tmp_path, server, 2, small(1, begin=2 * server, end=2 * server + 2), keep=1)
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(serve, server) for server in range(2)]
        before = np.zeros(4)
        while not all(future.done() for future in running):
            state = read(tmp_path, DIGEST, [("w", 0, 4)])
            value = state.parts[0].value[:, 0]
            assert value[0] == value[1]
            assert value[2] == value[3]
            assert (value >= before).all()
            assert state.progress.version == value.min()
            before = value
        for future in running:
            future.result()
    assert (read(tmp_path, DIGEST, [("w", 0, 4)]).parts[0].value == 39).all()


# Which files stay.


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_snapshots_of_a_server_stay(tmp_path, keep):
    for version in range(1, 6):
        write(tmp_path, 0, 1, shard(0, 1, version), keep)
    assert names(tmp_path) == [f"server-0-of-1.{number:09d}.npz" for number in range(6 - keep, 6)]


def test_other_servers_snapshots_stay(tmp_path):
    [path] = [write(tmp_path, 1, 2, shard(1, 2))]
    for _ in range(5):
        write(tmp_path, 0, 2, shard(0, 2))
    assert path.exists()
    assert len(names(tmp_path)) == 3


def test_snapshots_of_another_number_of_servers_stay_while_they_are_needed(tmp_path):
    """The rows of server 1 of 2 were those of servers 1 and 2 of 3."""
    older, old = write_all(tmp_path, 3), write_all(tmp_path, 3)
    assert all(path.exists() for path in older)
    write_all(tmp_path, 2)
    for _ in range(3):
        write(tmp_path, 0, 2, shard(0, 2))
    assert not any(path.exists() for path in older)
    assert [path.exists() for path in old] == [False, True, True], "the second newest of the rows of server 1"
    write(tmp_path, 1, 2, shard(1, 2))
    assert not any(path.exists() for path in old)
    for server in range(2):
        assert_same(read(tmp_path, DIGEST, rows_of(server, 2)), shard(server, 2))


def test_file_with_rows_in_no_other_file_stays(tmp_path):
    """A server may hold other rows than before, although the number of servers is the same."""
    old = write(tmp_path, 0, 2, small(1, begin=0, end=3), keep=1)
    write(tmp_path, 0, 2, small(2, begin=0, end=2), keep=1)
    assert old.exists()
    [part] = read(tmp_path, DIGEST, [("w", 0, 3)]).parts
    np.testing.assert_array_equal(part.value[:, 0], [2, 2, 1])
    write(tmp_path, 1, 2, small(2, begin=2, end=4), keep=1)
    write(tmp_path, 0, 2, small(3, begin=0, end=2), keep=1)
    assert not old.exists()


def test_leftovers_of_killed_servers_are_removed(tmp_path):
    leftover, before = "server-0-of-2.000000004.npz.partial", "server-2-of-3.000000001.npz.partial"
    writing, foreign = "server-1-of-2.000000004.npz.partial", "notes.partial"
    for name in (leftover, before, writing, foreign):
        (tmp_path / name).write_bytes(b"x")
    path = write(tmp_path, 0, 2, shard(0, 2))
    assert names(tmp_path) == sorted([path.name, writing, foreign])


# Damage.


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 0x10
    path.write_bytes(content)


def truncate(path, place):
    os.truncate(path, int(place * path.stat().st_size))


@pytest.mark.parametrize("place", [0.0, 0.1, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("damage", [truncate, flip])
def test_previous_file_is_read_if_the_last_is_damaged(tmp_path, caplog, damage, place):
    write(tmp_path, 0, 1, small(1))
    path = write(tmp_path, 0, 1, small(2))
    content = path.read_bytes()
    damage(path, place)
    state = read(tmp_path, DIGEST, [("w", 0, 4)])
    if state.progress.version == 2:  # of a byte that says nothing, such as a date
        assert damage is flip
    else:
        assert state.progress.version == 1
        assert path.name in caplog.text
    np.testing.assert_array_equal(state.parts[0].value, np.full((4, 2), state.progress.version, np.float32))
    path.write_bytes(content)
    assert read(tmp_path, DIGEST, [("w", 0, 4)]).progress.version == 2


def test_damage_of_one_server_does_not_affect_others(tmp_path, caplog):
    write_all(tmp_path, 3, 4)
    *_, path = write_all(tmp_path, 3, 5)
    truncate(path, 0.5)
    state = read(tmp_path, DIGEST, rows_of(0, 1))
    assert state.progress.version == 4
    [part] = [part for part in state.parts if part.path == "embedding/embeddings"]
    [new], [old] = (list(parts_of(version, [(part.path, 0, 40_000)])) for version in (5, 4))
    np.testing.assert_array_equal(part.value[:26_666], new.value[:26_666])
    np.testing.assert_array_equal(part.value[26_666:], old.value[26_666:])
    assert caplog.text.count(path.name) == 1


def test_foreign_files_of_the_same_name_are_passed_over(tmp_path, caplog):
    write(tmp_path, 0, 1, small(1))
    np.savez(tmp_path / "server-0-of-1.000000002.npz", w=np.ones(3))
    (tmp_path / "server-0-of-1.000000003.npz").mkdir()
    (tmp_path / "server-0-of-1.000000004.npz").symlink_to("gone")  # like one that is removed while it is read
    (tmp_path / "server-0-of-1.000000005.npz").touch()
    assert read(tmp_path, DIGEST, [("w", 0, 4)]).progress.version == 1
    assert [f"{number:09d}.npz cannot be read" in caplog.text for number in range(1, 6)] == [False] + [True] * 4
    assert write(tmp_path, 0, 1, small(2)).name == "server-0-of-1.000000006.npz"


def test_damage_of_all_files_raises(tmp_path):
    path = write(tmp_path, 0, 1, small(1))
    truncate(path, 0.5)
    with pytest.raises(SnapshotError, match=rf"lack rows .*w \[0:4\].*damaged: {path.name}.*remove the folder"):
        read(tmp_path, DIGEST, [("w", 0, 4)])


# Kills.

PROGRAM = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tfdist.parameter_server.protocol.state import ShardProgress
from tfdist.parameter_server.snapshots.sharded import PartState, ShardState, write

folder, first, dies_in = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
for version in range(first, first + 1000):
    if version == first + 2 and dies_in:
        setattr(os, dies_in, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    value, slot = (np.full(100_000, version + more, np.float32) for more in (0, 0.5))
    part = PartState("w", 0, 100_000, 100_000, value, {"momentum": slot})
    progress = ShardProgress(version, {0: version})
    write(folder, 0, 1, ShardState("model", {}, {"iterations": np.array(version)}, (part,), progress))
    print(version, flush=True)
"""


def start(folder, first, dies_in=""):
    arguments = [sys.executable, "-c", PROGRAM, str(folder), str(first), dies_in]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def version_in(folder):
    """The version that is read, after checks that it is whole."""
    state = read(folder, "model", [("w", 0, 100_000)])
    [part] = state.parts
    assert (part.value == state.progress.version).all()
    assert (part.slots["momentum"] == state.progress.version + 0.5).all()
    assert state.scalars["iterations"] == state.progress.version
    assert state.progress.counted == {0: state.progress.version}
    return state.progress.version


def is_written(folder, part):
    """Whether so much of the next snapshot is in its file."""
    with contextlib.suppress(FileNotFoundError):
        return any(path.stat().st_size >= part * 800_000 for path in folder.glob("*.partial"))
    return False


def test_after_a_kill_at_any_moment_the_last_snapshot_is_whole(tmp_path):
    """SIGKILL hits a loop of writes when the file of the next one has a certain size."""
    version = 0
    for part in (0.0, 0.3, 0.6, 0.95):
        with start(tmp_path, version + 1) as process:
            process.stdout.readline()
            while process.poll() is None and not is_written(tmp_path, part):
                pass
            process.kill()
            written = max(map(int, process.stdout), default=version + 1)
        assert process.returncode == -signal.SIGKILL
        version = version_in(tmp_path)
        assert written <= version <= written + 1, "what was written before the kill is there"
    write(tmp_path, 0, 1, small(version + 1))
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize(("dies_in", "expected"), [("fsync", 2), ("replace", 2), ("unlink", 3)])
def test_kill_within_a_write_leaves_a_whole_snapshot(tmp_path, dies_in, expected):
    """The third write dies before the file is on the disk, before it has its name, and before the first is removed."""
    with start(tmp_path, 1, dies_in) as process:
        assert process.stdout.read().split() == ["1", "2"]
    assert process.returncode == -signal.SIGKILL
    assert version_in(tmp_path) == expected
    write(tmp_path, 0, 1, ShardState("model", {}, {}, (), ShardProgress(9)))
    assert version_in(tmp_path) == expected
    assert not list(tmp_path.glob("*.partial"))


# What a person has to decide.


def test_snapshots_of_another_model_are_refused(tmp_path):
    write_all(tmp_path, 2)
    with pytest.raises(SnapshotError, match=f"{tmp_path} are of another model: .*{DIGEST}, this model fedc.*folder"):
        read(tmp_path, "fedc", rows_of(0, 2))
    assert issubclass(SnapshotError, TfdistError)


def test_missing_rows_are_an_error(tmp_path):
    """As where each server has a folder of its own, and their number has changed."""
    write(tmp_path, 0, 3, shard(0, 3))
    message = r"lack rows .*embeddings \[13333:40000\].*Readable files: server 0 of 3\. .*one folder"
    with pytest.raises(SnapshotError, match=message):
        read(tmp_path, DIGEST, rows_of(0, 1))


def test_incomplete_snapshots_of_untrained_servers_are_ignored(tmp_path):
    """One server has written its untrained variables, the other has not."""
    write(tmp_path, 0, 2, shard(0, 2, 0))
    assert read(tmp_path, DIGEST, rows_of(1, 2)) is None
    assert_same(read(tmp_path, DIGEST, rows_of(0, 2)), shard(0, 2, 0))
    write(tmp_path, 0, 2, shard(0, 2, 1))
    with pytest.raises(SnapshotError, match="lack rows"):
        read(tmp_path, DIGEST, rows_of(1, 2))


def test_splitting_variable_with_other_slot_shapes_raises(tmp_path):
    write(tmp_path, 0, 1, shard(0, 1))
    with pytest.raises(SnapshotError, match=r"'dense/kernel' .* cannot be split .* 'factor' has the shape \(40,\)"):
        read(tmp_path, DIGEST, [("dense/kernel", 0, 20)])


def test_rows_of_different_optimizers_are_not_joined(tmp_path):
    write(tmp_path, 0, 2, small(1, begin=0, end=2, momentum=np.zeros((2, 2), np.float32)))
    write(tmp_path, 1, 2, small(1, begin=2, end=4))
    with pytest.raises(SnapshotError, match="'w' come from servers with different optimizers"):
        read(tmp_path, DIGEST, [("w", 0, 4)])


@pytest.fixture
def folder():
    """One that other users can enter, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@contextlib.contextmanager
def without_rights(path, mode):
    """Takes rights from a path, and from root its privileges."""
    before, user = path.stat().st_mode, os.geteuid()
    path.chmod(mode)
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)
        path.chmod(before)


def test_unwritable_folder_raises(folder):
    path = write(folder, 0, 1, small(1))
    message = f"server 0 cannot be written to {folder}: Permission denied. Give a folder"
    with without_rights(folder, 0o555), pytest.raises(SnapshotError, match=message):
        write(folder, 0, 1, small(2))
    assert names(folder) == [path.name]


def test_unreadable_folder_raises(folder):
    write(folder, 0, 1, small(1))
    message = f"snapshots in {folder} cannot be read: Permission denied. Give a folder"
    with without_rights(folder, 0o333), pytest.raises(SnapshotError, match=message):
        read(folder, DIGEST, [("w", 0, 4)])


def test_unreadable_file_raises(folder):
    """The one before would silently undo training."""
    write(folder, 0, 1, small(1))
    path = write(folder, 0, 1, small(2))
    with without_rights(path, 0o200), pytest.raises(SnapshotError, match=f"{path} cannot be read: Permission denied"):
        read(folder, DIGEST, [("w", 0, 4)])


def test_file_in_place_of_the_folder_raises(tmp_path):
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(SnapshotError, match=f"written to {path}: File exists"):
        write(path, 0, 1, small(1))
    with pytest.raises(SnapshotError, match=f"snapshots in {path} cannot be read: Not a directory"):
        read(path, DIGEST, [("w", 0, 4)])


def test_a_full_disk_leaves_the_snapshots_as_they_were(tmp_path):
    """A limit of the sizes of files fails in the middle of a write, as a full disk does."""
    before = write(tmp_path, 0, 1, shard(0, 1, 1), keep=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, hard))
    try:
        with pytest.raises(SnapshotError, match="three times the model"):
            write(tmp_path, 0, 1, shard(0, 1, 2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == [before.name]
    assert read(tmp_path, DIGEST, rows_of(0, 1)).progress.version == 1
    write(tmp_path, 0, 1, shard(0, 1, 2), keep=1)
    assert read(tmp_path, DIGEST, rows_of(0, 1)).progress.version == 2


def test_equal_paths_raise(tmp_path):
    [part] = small(1).parts
    twice = ShardState(DIGEST, {}, {}, (part, part), ShardProgress(1))
    with pytest.raises(ValueError, match="two variables have the path 'w'"):
        write(tmp_path, 0, 1, twice)
    with pytest.raises(ValueError, match="two variables have the path 'w'"):
        read(tmp_path, DIGEST, [("w", 0, 2), ("w", 2, 4)])


@pytest.mark.parametrize(("server", "servers", "keep"), [(2, 2, 2), (-1, 2, 2), (0, 1, 0)])
def test_invalid_arguments_raise(tmp_path, server, servers, keep):
    with pytest.raises(ValueError, match="keep >= 1 and 0 <= server < servers; got"):
        write(tmp_path, server, servers, small(1), keep)


def test_the_parts_come_in_the_order_in_which_they_are_wanted(tmp_path):
    write_all(tmp_path, 2)
    wanted = rows_of(0, 1)[::-1]
    assert_same_parts(read(tmp_path, DIGEST, wanted).parts, list(parts_of(7, wanted)))
