import logging

import numpy as np
import pytest

from tfdist.parameter_server.protocol.state import HeldRows, ShardProgress
from tfdist.parameter_server.snapshots.running import Snapshots
from tfdist.parameter_server.snapshots.sharded import PartState, ShardState, SnapshotError

HELD = (HeldRows("w", 0, 3, 3),)


def state_of(version):
    part = PartState("w", 0, 3, 3, np.full(3, version, np.float32), {})
    return ShardState("model", {}, {}, (part,), ShardProgress(version))


def test_written_snapshot_is_found(tmp_path, caplog):
    snapshots = Snapshots(tmp_path / "new", 0, 1, 60.0)
    assert snapshots.find("model", HELD) is None
    snapshots.write(state_of(4))
    snapshots.wait()
    assert Snapshots(tmp_path / "new", 0, 1, 60.0).find("model", HELD).progress.version == 4
    assert "with 4 updates" in caplog.text
    with pytest.raises(SnapshotError, match="of another model"):
        snapshots.find("other", HELD)


def test_unchanged_version_is_not_written_again(tmp_path):
    snapshots = Snapshots(tmp_path, 0, 1, 60.0)
    for version in (1, 1, 2):
        snapshots.write(state_of(version))
        snapshots.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "server-0-of-1.000000001.npz",
        "server-0-of-1.000000002.npz",
    ]


def test_next_snapshot_is_due_after_the_interval(tmp_path):
    assert Snapshots(tmp_path, 0, 1, 0.0).seconds_left == 0
    snapshots = Snapshots(tmp_path, 0, 1, 1000.0)
    assert 900 < snapshots.seconds_left <= 1000


def test_unwritable_folder_is_logged_and_raises_nothing(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    snapshots = Snapshots(tmp_path / "file", 0, 1, 60.0)
    with caplog.at_level(logging.ERROR):
        snapshots.write(state_of(1))
        snapshots.wait()
    assert "cannot be written" in caplog.text
