"""Workers that the cluster does not name join a job on parameter servers, with real processes."""

import json
import signal

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "servers_elastic.py")
EPOCH, EPOCHS = 22, 6


def test_workers_join_in_the_first_epoch_and_leave_or_die_like_any_other(tmp_path):
    addresses = [f"127.0.0.1:{port}" for port in harness.free_ports(3)]
    cluster = {"worker": addresses[:2], "ps": addresses[2:]}
    tasks = [("worker", 0), ("worker", 1), ("ps", 0), ("worker", 5), ("worker", 7)]
    configs = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})} for job, index in tasks
    ]
    command = [PROGRAM, str(tmp_path)]
    with harness.started(command, 3, per_rank=configs[:3]) as named:
        for rank in (0, 1):
            named.await_output(rank, "HOLDS")
        with harness.started(command, 2, per_rank=configs[3:]) as others:
            ended = [*named.wait(), *others.wait()]
            outputs = named.outputs() + others.outputs()
    assert [end.code for end in ended] == [0, 0, 0, 0, -signal.SIGKILL], outputs
    results = harness.results([*ended[:2], ended[3]])
    assert [result["pushes"] for result in results] == [EPOCHS * EPOCH] * 3, outputs
    assert max(result["iterations"] for result in results) == 3 * EPOCHS * EPOCH + EPOCH, (
        "worker 7's first epoch counts"
    )
    last = max(results, key=lambda result: sum(result["counted"].values()))["counted"]
    assert sorted(last.values()) == [EPOCH, *[EPOCHS * EPOCH] * 3], outputs
    assert min(result["accuracy"] for result in results) > 0.8, outputs
    assert "worker 7, process" in ended[0].output, "its death is told by name"
    harness.assert_nothing_left()
