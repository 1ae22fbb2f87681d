"""Parameter servers and their workers are killed and stopped while they train, and come back."""

import json
import signal
import time

import numpy as np
import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "servers_faults.py")
TASKS = [("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1)]
EPOCH = 22
"""Steps of an epoch."""


def await_snapshot(folder, server, version):
    """Waits until a server has written a snapshot of a version."""
    end, newest = time.monotonic() + harness.DEADLINE, None
    while newest != version:
        assert time.monotonic() < end, f"the newest snapshot of server {server} is of version {newest}"
        files = sorted(folder.glob(f"*/server-{server}-of-2.*.npz"))
        if files:
            with np.load(files[-1]) as file:
                newest = json.loads(file["metadata"].tobytes())["progress"]["version"]
        time.sleep(0.01)


@pytest.mark.parametrize("kind", ["dense", sweep("embedding")])
def test_a_server_comes_back_from_its_snapshot_and_a_stopped_worker_goes_on(tmp_path, kind):
    given = harness.tf_configs(*TASKS)
    with harness.started([PROGRAM, str(tmp_path), kind], 4, per_rank=given) as processes:
        for rank in (0, 1):
            processes.await_output(rank, "EPOCH 3")
        await_snapshot(tmp_path / "snapshots", 1, 2 * 3 * EPOCH)
        processes.signal(3, signal.SIGKILL)
        processes.signal(1, signal.SIGSTOP)
        with harness.started([PROGRAM, str(tmp_path), kind], 1, per_rank=given[3:]) as again:
            for worker in (0, 1):
                (tmp_path / f"go {worker}").touch()
            processes.await_output(0, "EPOCH 7")
            processes.signal(1, signal.SIGCONT)
            ended = [*processes.wait(), *again.wait()]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, 0, -signal.SIGKILL, 0], outputs
    assert f"parameter server 1 goes on from the snapshots in {tmp_path}" in ended[4].output, outputs
    results = harness.results(ended[:2])
    assert [result["pushes"] for result in results] == [8 * EPOCH] * 2, outputs
    assert max(result["iterations"] for result in results) == 2 * 8 * EPOCH, "each counts once: nothing had come since"
    assert min(result["accuracy"] for result in results) > 0.8, outputs
    if kind == "embedding":
        assert max(result["tables sent"] for result in results) < 8 * EPOCH, "whole, there would be one for each push"
    harness.assert_nothing_left()


def test_no_update_is_lost_if_servers_have_copies(tmp_path):
    given, command = harness.tf_configs(*TASKS), [PROGRAM, str(tmp_path), "embedding", "copies"]
    with harness.started(command, 4, {"TFDIST_HEARTBEAT_TIMEOUT": "30"}, per_rank=given) as processes:
        processes.await_output(0, "EPOCH 1")
        processes.signal(3, signal.SIGKILL)
        for rank in (0, 1):
            processes.await_output(rank, "EPOCH 3")
        with harness.started(command, 1, per_rank=given[3:]) as again:
            for server in (0, 1):
                again.await_output(0, f"has a copy of parameter server {server} again")
            for worker in (0, 1):
                (tmp_path / f"go {worker}").touch()
            processes.await_output(0, "EPOCH 5")
            processes.signal(2, signal.SIGKILL)
            ended = [*processes.wait(), *again.wait()]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, -signal.SIGKILL, -signal.SIGKILL, 0], outputs
    results = harness.results(ended[:2])
    assert [result["pushes"] for result in results] == [8 * EPOCH] * 2, outputs
    for what in ("iterations", "version"):
        assert max(result[what] for result in results) == 2 * 8 * EPOCH, "no update is lost, and none is counted twice"
    assert min(result["accuracy"] for result in results) > 0.8, outputs
    assert "updates are lost" not in outputs
    harness.assert_nothing_left()


def test_copy_replaces_a_stopped_server(tmp_path):
    """When the rendezvous says so, for which workers wait; what wakes up again is told."""
    given, command = harness.tf_configs(*TASKS), [PROGRAM, str(tmp_path), "dense", "copies"]
    with harness.started(command, 4, {"TFDIST_HEARTBEAT_TIMEOUT": "5"}, per_rank=given) as processes:
        for rank in (0, 1):
            processes.await_output(rank, "EPOCH 3")
        processes.signal(2, signal.SIGSTOP)
        for worker in (0, 1):
            (tmp_path / f"go {worker}").touch()
        for rank in (0, 1):
            processes.await_output(rank, "EPOCH 5")
        processes.signal(2, signal.SIGCONT)
        ended = processes.wait()
        outputs = processes.outputs()
    assert [end.code for end in ended] == [0, 0, 1, 0], outputs
    assert "is lost: ps 1" in ended[3].output, outputs
    assert "The other tasks consider this process, task 2, lost" in ended[2].output, outputs
    results = harness.results(ended[:2])
    assert max(result["iterations"] for result in results) == 2 * 8 * EPOCH, (
        "no update is lost, and none is counted twice"
    )
    harness.assert_nothing_left()


def test_the_chief_dies_and_comes_back(tmp_path):
    given = harness.tf_configs(*TASKS)
    with harness.started([PROGRAM, str(tmp_path), "dense"], 4, per_rank=given) as processes:
        processes.await_output(0, "EPOCH 3")
        processes.signal(0, signal.SIGKILL)
        (tmp_path / "go 0").touch()
        with harness.started([PROGRAM, str(tmp_path), "dense"], 1, per_rank=given[:1]) as again:
            again.await_output(0, "EPOCH 5")
            (tmp_path / "go 1").touch()
            ended = [*again.wait(), *processes.wait()[1:]]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, 0, 0], outputs
    assert "EPOCH 0" not in ended[0].output, "it goes on from its backup"
    chief, worker = harness.results(ended[:2])
    assert (chief["pushes"], worker["pushes"]) == (5 * EPOCH, 8 * EPOCH), outputs
    assert max(chief["iterations"], worker["iterations"]) == 2 * 8 * EPOCH, "the servers kept what the first one pushed"
    assert chief["accuracy"] > 0.8, outputs
    harness.assert_nothing_left()


def test_servers_that_are_gone_are_an_error(tmp_path):
    given = harness.tf_configs(*TASKS)
    with harness.started(
        [PROGRAM, str(tmp_path), "dense"], 4, {"TFDIST_HEARTBEAT_TIMEOUT": "10"}, per_rank=given
    ) as processes:
        for rank in (0, 1):
            processes.await_output(rank, "EPOCH 3")
        for rank in (2, 3):
            processes.signal(rank, signal.SIGKILL)
        for worker in (0, 1):
            (tmp_path / f"go {worker}").touch()
        ended = processes.wait()
        outputs = processes.outputs()
    assert [end.code for end in ended[:2]] == [1, 1], outputs
    words = "has not answered for 10 s: its process has ended, the link to it is cut"
    assert any(words in end.output for end in ended[:2]), outputs
    harness.assert_nothing_left()
