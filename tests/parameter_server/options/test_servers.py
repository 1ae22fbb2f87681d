from pathlib import Path

import pytest

from tfdist.parameter_server import PerHost, Servers


@pytest.mark.parametrize("kind", [Servers, PerHost])
def test_snapshots_need_a_local_folder(kind):
    assert kind(snapshots=Path("a") / "b").snapshots == "a/b"
    with pytest.raises(
        ValueError, match=rf"{kind.__name__}\(snapshots=…\) must be a folder of a file system; got gs://b"
    ):
        kind(snapshots="gs://b")


@pytest.mark.parametrize("seconds", ["60", 0, -1.0, True])
def test_invalid_snapshot_seconds_raise(seconds):
    with pytest.raises(ValueError, match=r"snapshot_seconds=…\) must be a number of seconds above 0"):
        Servers(snapshot_seconds=seconds)


@pytest.mark.parametrize("copies", [2, -1, True, None])
def test_invalid_number_of_copies_raises(copies):
    with pytest.raises(ValueError, match="must be 0 or 1; got"):
        Servers(copies=copies)
