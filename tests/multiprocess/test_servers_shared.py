"""Batches that are dealt out to workers, with real processes."""

import json
import signal
import time

import numpy as np
import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "servers_shared.py")
BATCHES, EPOCHS = 44, 3


def test_a_worker_is_killed_and_every_sample_of_each_epoch_counts_once(tmp_path):
    """The killed worker also holds a batch that it has prepared; the other worker gets that batch, too."""
    given = harness.tf_configs(("worker", 0), ("worker", 1), ("ps", 0), ("ps", 1))
    with harness.started([PROGRAM, str(tmp_path), "worker"], 4, per_rank=given) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
    assert [end.code for end in ended] == [0, -signal.SIGKILL, 0, 0], outputs
    (result,) = harness.results(ended[:1])
    assert result["counts"] == [EPOCHS], outputs
    assert result["iterations"] == EPOCHS * BATCHES, outputs
    assert result["pushes"] == EPOCHS * BATCHES - 3, outputs
    assert result["accuracy"] > 0.7, outputs
    harness.assert_nothing_left()


def books(folder):
    """The dealer's, in the newest snapshot; None without one."""
    files = sorted(folder.glob("snapshots/*/server-0-of-1.*.npz"))
    if not files:
        return None
    with np.load(files[-1]) as file:
        return json.loads(file["metadata"].tobytes())["deals"]


def test_the_dealer_comes_back_and_every_sample_of_each_epoch_counts_once(tmp_path):
    """Both workers have trained on three batches and hold others; what a snapshot lacks is dealt again."""
    given = harness.tf_configs(("worker", 0), ("worker", 1), ("ps", 0))
    with harness.started([PROGRAM, str(tmp_path), "server"], 3, per_rank=given) as processes:
        for worker in (0, 1):
            processes.await_output(worker, "HOLDS")
        end = time.monotonic() + 60
        while (deals := books(tmp_path)) is None or not any(epoch["dealt"] >= 4 for epoch in deals["dealer"]["epochs"]):
            assert time.monotonic() < end, deals
            time.sleep(0.01)
        processes.signal(2, signal.SIGKILL)
        with harness.started([PROGRAM, str(tmp_path), "server"], 1, per_rank=given[2:]) as again:
            (tmp_path / "back").touch()
            ended = [*processes.wait(), *again.wait()]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, -signal.SIGKILL, 0], outputs
    for result in harness.results(ended[:2]):
        assert result["counts"] == [EPOCHS], outputs
        assert result["iterations"] == EPOCHS * BATCHES, outputs
    harness.assert_nothing_left()


def test_the_chief_comes_back_and_goes_on_with_its_stream(tmp_path):
    """The other worker has what the chief had read and not trained on, and waits for the rest."""
    given = harness.tf_configs(("chief", 0), ("worker", 0), ("ps", 0))
    command = [PROGRAM, str(tmp_path), "chief"]
    with harness.started(command, 3, per_rank=given) as processes:
        processes.popens[0].wait(harness.DEADLINE)
        assert (tmp_path / "died").exists(), processes.outputs()
        with harness.started(command, 1, per_rank=given[:1]) as again:
            ended = [*again.wait(), *processes.wait()[1:]]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, 0], outputs
    for result in harness.results(ended[:2]):
        assert result["counts"] == [EPOCHS], outputs
        assert result["iterations"] == EPOCHS * BATCHES, outputs
    harness.assert_nothing_left()
