"""`AllReduceStrategy` in a job with parameter servers, with real processes."""

import signal

import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "embeddings_beside_all_reduce.py")
WORKERS = ("worker", 0), ("worker", 1)


def assert_as_one_process(results):
    assert [result["ranks"] for result in results] == [0.0, 0.0], "dense weights are equal to the last bit"
    remaining = dict(results[0])
    assert remaining.pop("keys"), results
    assert remaining.pop("ranks") == 0
    assert max(remaining.values()) < 1e-5, results


def test_two_workers_train_like_one_process(tmp_path):
    given = harness.tf_configs(*WORKERS, ("ps", 0), ("ps", 1))
    with harness.started([PROGRAM, str(tmp_path), "compare"], 4, {"TFDIST_SECRET": "x"}, per_rank=given) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * 4, processes.outputs()
    assert_as_one_process(harness.results(ended[:2]))
    harness.assert_nothing_left()


@pytest.mark.parametrize("killed", [*map(sweep, ("ps 0", "worker 1"))])
def test_a_task_that_is_killed_ends_the_job(tmp_path, killed):
    what = ["compare", "train"] if killed == "ps 0" else ["train"]
    with harness.started(
        [PROGRAM, str(tmp_path), *what], 3, per_rank=harness.tf_configs(*WORKERS, ("ps", 0))
    ) as processes:
        for rank in (0, 1):
            processes.await_output(rank, "READY")
        processes.signal(2 if killed == "ps 0" else 1, signal.SIGKILL)
        ended = processes.wait()
        outputs = processes.outputs()
    if killed == "ps 0":
        assert_as_one_process(harness.results(ended[:2]))
    survivors = ended[:2] if killed == "ps 0" else ended[:1]
    for end in survivors:
        assert end.code == 1, outputs
        assert "ERROR PeerLostError" in end.output, outputs
        error = end.output.partition("ERROR PeerLostError ")[2]
        assert killed in error, outputs
        assert ("Rows of embeddings were on it" in error) == (killed == "ps 0"), outputs
    if killed == "worker 1":
        assert ended[2].code == 0, outputs
    harness.assert_nothing_left()
