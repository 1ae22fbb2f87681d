"""`DynamicEmbedding` on parameter servers, with real processes."""

import json
import signal
import time

import numpy as np
import pytest

from tests.multiprocess import harness, test_servers_faults

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "dynamic_embedding.py")


@pytest.mark.sweep
def test_two_tables_are_trained_on_two_servers():
    given = harness.tf_configs(*test_servers_faults.TASKS)
    with harness.started([PROGRAM], 4, {"TFDIST_SECRET": "x"}, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * 4, processes.outputs()
    results = harness.results(ended[:2])
    for result in results:
        assert result["accuracy"] > 0.8, results
        assert result["steps"] == 6 * 20
        assert result["users"] == [60, True], "those of training and no others, from both servers"
        assert result["items"] == [80, True]
        assert 0.2 < result["kept"] < 1, results
    harness.assert_nothing_left()


def await_snapshots(folder, updates):
    """Waits until the server 1 has written snapshots of both tables with so many updates."""
    end = time.monotonic() + harness.DEADLINE
    for table in ("users", "items"):
        version = None
        while version != updates:
            assert time.monotonic() < end, f"the newest snapshot of {table} has {version} updates"
            for path in sorted(folder.glob(f"table-{table}-*/server-1-of-2.*.npz"))[-1:]:
                with np.load(path) as file:
                    version = json.loads(file["metadata"].tobytes())["progress"]["version"]
            time.sleep(0.01)


def test_a_server_comes_back_with_its_rows(tmp_path):
    given = harness.tf_configs(*test_servers_faults.TASKS)
    with harness.started([PROGRAM, str(tmp_path)], 4, per_rank=given) as processes:
        for rank in (0, 1):
            processes.await_output(rank, "EPOCH 3")
        await_snapshots(tmp_path / "snapshots", 2 * 3 * 20)
        processes.signal(3, signal.SIGKILL)
        with harness.started([PROGRAM, str(tmp_path)], 1, per_rank=given[3:]) as again:
            (tmp_path / "go").touch()
            ended = [*processes.wait(), *again.wait()]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, 0, -signal.SIGKILL, 0], outputs
    for table in ("users", "items"):
        assert f"goes on from snapshots of the table {table}-0" in ended[4].output, outputs
    for result in harness.results(ended[:2]):
        assert result["accuracy"] > 0.8, outputs
        assert (result["users"], result["items"]) == ([60, True], [80, True]), outputs
    harness.assert_nothing_left()
