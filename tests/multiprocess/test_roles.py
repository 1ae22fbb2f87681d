"""Tasks without a rank beside those that train: their deaths end nothing, and they may come back."""

import signal

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

PROGRAM = [str(harness.PROGRAMS / "roles.py")]
TASKS = [("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]


def test_a_killed_server_comes_back_while_the_workers_train():
    given = harness.tf_configs(*TASKS)
    with harness.started(PROGRAM, 4, per_rank=given) as processes:
        processes.await_output(0, "TRAINING")
        processes.await_output(2, "SERVING")
        processes.signal(2, signal.SIGKILL)
        for rank in (0, 1):
            processes.await_output(rank, "LOST ps 0")
        with harness.started(PROGRAM, 1, per_rank=given[2:3]) as again:
            ended = [*processes.wait(), *again.wait()]
            outputs = processes.outputs() + again.outputs()
    assert [end.code for end in ended] == [0, 0, -signal.SIGKILL, 0, 0], outputs
    for rank, words in enumerate(("chief 0 2", "worker 1 2", "ps -1 2", "evaluator -1 2", "ps -1 2")):
        assert f"ROLE {words}" in ended[rank].output, outputs
    for end in ended[:2]:
        assert "DONE" in end.output, outputs
    for end in ended[3:]:
        assert "REFUSED this task is of the job" in end.output, outputs
        assert "OVER" in end.output, outputs
    harness.assert_nothing_left()


def test_failed_evaluator_is_named_and_training_continues():
    ended = harness.tfdist("run", "-n", "2", "--ps", "1", "--evaluators", "1", "--output", "all", *PROGRAM, "fail")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "exited with code 1; the training goes on without it." in ended.stderr
    assert "[evaluator 0] ValueError: no data to evaluate" in ended.stderr
    for name in ("rank 0", "rank 1"):
        assert f"[{name}] DONE" in ended.stdout
    assert "[ps 0] OVER" in ended.stdout
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("tfdist run: evaluator 0 (process"), ended.stderr
    assert last.endswith("exited with code 1; the other processes were left to themselves."), ended.stderr
    harness.assert_nothing_left()
