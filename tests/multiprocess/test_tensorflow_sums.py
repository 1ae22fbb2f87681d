"""`AllReduceStrategy(algorithm="tensorflow")`: plain Keras's updates, by TensorFlow's collectives between processes."""

import re
import signal

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import some, sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "tensorflow_sums.py")
CHECKS = ["models", "buckets", "features", "loops", "refused"]
SWEPT = ["optimizers", "strategies", "compressed"]


@checks({2: [*CHECKS, *map(sweep, SWEPT)], 3: [*map(sweep, CHECKS), *map(sweep, SWEPT)]})
def test_sums_by_tensorflow_train_as_plain_keras(size, check, passes):
    passes(size, check)


@pytest.mark.sweep
@pytest.mark.skipif(not harness.MPIEXEC.exists(), reason="needs MPICH's mpiexec")
def test_by_mpiexec():
    ended = harness.mpiexec(2, PROGRAM, TEST_CASES="models,loops")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("PASSED loops") == 2, ended.stdout


def some_times(count):
    """Numbers of processes, ranks and epochs; one of them is always run."""
    return some([(2 + place % 2, place // 2 % 2, 1 + place) for place in range(2, 2 + count)], every=count)


@pytest.mark.parametrize(("size", "rank", "epoch"), some_times(20))
def test_killed_rank_is_named(tmp_path, size, rank, epoch):
    how = {"ready": f"READY {epoch}.", "TEST_CASES": "endless"}
    harness.assert_killed_rank_is_named([PROGRAM, str(tmp_path)], size=size, rank=rank, **how)


@pytest.mark.parametrize(("size", "rank", "epoch"), some_times(10))
def test_stopped_rank_is_named(tmp_path, size, rank, epoch):
    settings = {"TEST_CASES": "endless", "TFDIST_HEARTBEAT_TIMEOUT": "5"}
    with harness.started([PROGRAM, str(tmp_path)], size, settings) as processes:
        processes.await_output(rank, f"READY {epoch}.")
        processes.signal(rank, signal.SIGSTOP)
        for other in set(range(size)) - {rank}:
            processes.await_output(other, "gave no sign of life")
            named = rf"PeerLostError: rank {rank}, worker {rank} .* gave no sign of life"
            assert re.search(named, processes.output(other)), processes.outputs()


@pytest.mark.sweep
def test_rank_that_sticks_before_a_sum_is_named(tmp_path):
    """The ranks have agreed to take the step, so that no collective of tfdist itself waits for it."""
    settings = {"TEST_CASES": "stuck", "TFDIST_COLLECTIVE_TIMEOUT": "5"}
    with harness.started([PROGRAM, str(tmp_path)], 3, settings) as processes:
        words = "waited 5 s in sum by TensorFlow (call 3), in which rank 1, worker 1"
        for rank in (0, 2):  # the one that comes first tells the other
            processes.await_output(rank, "RAISED")
            assert words in processes.output(rank).partition("RAISED")[2], processes.outputs()
