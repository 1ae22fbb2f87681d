"""Batches that are dealt out to workers, with real processes."""

import json
import signal

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

TASKS = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
BATCHES, EPOCHS = 44, 3


def test_a_worker_is_killed_and_every_sample_of_each_epoch_counts_once(tmp_path):
    """It holds a batch more, which it has prepared; the other worker gets that one."""
    ports = iter(harness.free_ports(len(TASKS)))
    cluster = {}
    for job, _ in TASKS:
        cluster.setdefault(job, []).append(f"127.0.0.1:{next(ports)}")
    configs = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})} for job, index in TASKS
    ]
    program = str(harness.PROGRAMS / "servers_shared.py")
    with harness.started([program, str(tmp_path)], len(TASKS), per_rank=configs) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
    assert [end.code for end in ended] == [0, -signal.SIGKILL, 0, 0], outputs
    (result,) = harness.results(ended[:1])
    assert result["counts"] == [EPOCHS], outputs
    assert result["iterations"] == EPOCHS * BATCHES, outputs
    assert result["pushes"] == EPOCHS * BATCHES - 3, outputs
    assert result["accuracy"] > 0.7, outputs
    harness.assert_nothing_left()
