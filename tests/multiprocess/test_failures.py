"""What becomes of a job when a part of it fails: a clear error, no hang, nothing left behind."""

import contextlib
import os
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import keras
import pytest

from tests.multiprocess import harness
from tests.sweeps import sweep

TRAIN = [str(harness.PROGRAMS / "train.py")]
DIE_AT_START = [str(harness.PROGRAMS / "die_at_start.py")]

pytestmark = pytest.mark.multiprocess


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    harness.assert_nothing_left()


@pytest.mark.parametrize(("size", "rank"), [(2, 0), sweep(2, 1), (3, 1)])
def test_killed_rank_is_named(size, rank, tmp_path):
    checkpoint = tmp_path / "last.keras"
    settings = {"TEST_DO": "say", "TEST_STEP": "50", "TEST_EPOCHS": "1000", "TEST_CHECKPOINT": str(checkpoint)}
    error = "ERROR PeerLostError "  # told by its connection, and so at once
    harness.assert_killed_rank_is_named(TRAIN, size, rank, error, **settings)
    assert keras.models.load_model(checkpoint).count_params() > 0
    assert [path.name for path in tmp_path.iterdir() if path.name != checkpoint.name] in ([], _partial(tmp_path, rank))


def _partial(folder, rank):
    """The chief may be killed while it writes; then the unfinished file is there beside the whole one."""
    return [path.name for path in folder.iterdir() if path.name.startswith(".")] if rank == 0 else []


def test_exception_on_one_rank_ends_the_others():
    with harness.started(TRAIN, 2, {"TEST_DO": "raise"}) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        assert "failed: ValueError: boom" in ended[0].output, processes.outputs()
        assert "ERROR PeerLostError rank 1" in ended[0].output, processes.outputs()
        assert 'raise ValueError("boom")' in ended[1].output, processes.outputs()


def test_early_exit_of_one_rank_ends_the_others():
    with harness.started(TRAIN, 2, {"TEST_DO": "exit"}) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 3], processes.outputs()
        assert "has ended its script without it" in ended[0].output, processes.outputs()


def stopped_rank():
    settings = {"TEST_DO": "stop", "TFDIST_HEARTBEAT_TIMEOUT": "3"}
    with harness.started(TRAIN, 2, settings) as processes:
        processes.await_output(0, "ERROR PeerLostError rank 1, worker 1")
        assert "gave no sign of life for" in processes.output(0)
        processes.signal(1, signal.SIGCONT)
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        assert "ERROR PeerLostError" in ended[1].output, processes.outputs()


def late_rank():
    settings = {"TEST_DO": "sleep", "TFDIST_COLLECTIVE_TIMEOUT": "3"}
    with harness.started(TRAIN, 2, settings) as processes:
        processes.await_output(0, "ERROR CollectiveTimeoutError rank 0 waited 3 s")
        assert re.search(r"\(call \d+\), in which rank 1, worker 1 .* did not take part", processes.output(0))


def test_ranks_that_build_different_models():
    with harness.started(TRAIN, 2, {"TEST_DO": "differ"}) as processes:
        ended = processes.wait()
        assert all(end.code == 1 for end in ended), processes.outputs()
        for end in ended:
            assert "MismatchError: ranks differ in the initial value of variable 0" in end.output, processes.outputs()
            assert "(32, 4)" in end.output, processes.outputs()
            assert "(32, 5)" in end.output, processes.outputs()
            assert "kernel" in end.output, processes.outputs()


@pytest.mark.parametrize("other", ["auto", sweep("tree")])
def test_ranks_with_different_settings(other):
    per_rank = [{"TEST_ALGORITHM": "ring"}, {"TEST_ALGORITHM": other}]
    with harness.started(TRAIN, 2, per_rank=per_rank) as processes:
        for end in processes.wait():
            assert end.code == 1, processes.outputs()
            assert "MismatchError: ranks differ in the settings of sums 0" in end.output, processes.outputs()
            assert "the algorithm ring" in end.output, processes.outputs()
            assert f"the algorithm {other}" in end.output, processes.outputs()


def test_interrupt_of_one_rank_ends_all():
    with harness.started(TRAIN, 2, {"TEST_DO": "say", "TEST_STEP": "20", "TEST_EPOCHS": "1000"}) as processes:
        processes.await_output(0, "READY")
        end = time.monotonic() + harness.DEADLINE
        while processes.popens[0].poll() is None and time.monotonic() < end:
            # Again, as a person would: in a destructor Python drops it, and TensorFlow's functions have one; of a
            # hundred interrupts of a plain Keras `fit`, three are lost.
            processes.signal(0, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes.popens[0].wait(20)
        ended = processes.wait()
        assert ended[0].code != 0, processes.outputs()
        assert "KeyboardInterrupt" in ended[0].output, processes.outputs()
        assert ended[1].code == 1, processes.outputs()
        assert "ERROR PeerLostError rank 0" in ended[1].output, processes.outputs()


def test_killed_rendezvous_server():
    with harness.started(TRAIN, 2, {"TEST_DO": "say", "TEST_STEP": "20", "TEST_EPOCHS": "1000"}) as processes:
        processes.await_output(1, "READY")
        kill_server(processes.popens[0].pid)
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        for end in ended:
            assert "the rendezvous server at 127.0.0.1" in end.output, processes.outputs()


def kill_server(chief):
    end = time.monotonic() + harness.DEADLINE
    while True:
        listing = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(chief)], capture_output=True, text=True, check=False
        )
        pids = [int(line.split()[0]) for line in listing.stdout.splitlines() if "tfdist.cluster.server" in line]
        if pids:
            os.kill(pids[0], signal.SIGKILL)
            return
        assert time.monotonic() < end, "no server process"
        time.sleep(0.01)


@pytest.mark.parametrize("rank", [0, 1])
def test_death_at_every_point_of_the_start(rank):
    """The victim ends itself as it reaches each point; the other must say so and end, and never hang.

    The jobs run at the same time, as they wait most of it.
    """
    with contextlib.ExitStack() as jobs:
        started = {}
        for point in ("before_handshake", "after_handshake", "in_mpi_init", "after_mpi_init"):
            per_rank = [{"TEST_POINT": point} if process == rank else {} for process in range(2)]
            job = harness.started(DIE_AT_START, 2, {"TFDIST_START_TIMEOUT": "6"}, per_rank)
            started[point] = jobs.enter_context(job)
        for point, processes in started.items():
            ended = processes.wait()
            survivor = ended[1 - rank]
            assert ended[rank].code == -signal.SIGKILL, (point, processes.outputs())
            assert survivor.code == 1, (point, processes.outputs())
            assert "rank" in survivor.output or "chief" in survivor.output or "Missing" in survivor.output, (
                point,
                processes.outputs(),
            )


def server_dies_at_start():
    per_rank = [{"TEST_POINT": "server_in_mpi_init"}, {}]
    with harness.started(DIE_AT_START, 2, {"TFDIST_START_TIMEOUT": "6"}, per_rank) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        for end in ended:
            assert "the rendezvous server at 127.0.0.1" in end.output, processes.outputs()


def deaf_mpi():
    per_rank = [{}, {"TEST_POINT": "deaf_in_mpi_init"}]
    with harness.started(DIE_AT_START, 2, {"TFDIST_START_TIMEOUT": "5"}, per_rank) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        for end in ended:
            assert "MPI's initialization failed: " in end.output, processes.outputs()
            assert "MPI did not start within 5 s" in end.output, processes.outputs()


def no_mpi():
    settings = {"MPI4PY_MPIABI": "mpich", "MPI4PY_LIBMPI": "/nonexistent/libmpi.so", "TFDIST_START_TIMEOUT": "10"}
    with harness.started(TRAIN, 2, settings) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [1, 1], processes.outputs()
        assert "MPIUnavailableError: no MPI library could be loaded" in ended[0].output, processes.outputs()
        assert "pip install mpich" in ended[0].output, processes.outputs()
        assert re.search("MPIUnavailableError|RendezvousError", ended[1].output), processes.outputs()


@pytest.fixture(scope="module")
def awaited():
    """Waits for a check of jobs that mostly wait themselves, and so run at the same time."""
    checks = (stopped_rank, late_rank, server_dies_at_start, deaf_mpi, no_mpi)
    with ThreadPoolExecutor(len(checks)) as threads:
        futures = {check: threads.submit(check) for check in checks}
    return lambda check: futures[check].result()


def test_stopped_rank_is_noticed_by_heartbeats(awaited):
    awaited(stopped_rank)


def test_late_rank_causes_collective_timeout(awaited):
    awaited(late_rank)


def test_death_of_the_server_during_the_start(awaited):
    """Both tasks wait in MPI's initialization while the server is killed."""
    awaited(server_dies_at_start)


def test_initialization_of_mpi_that_does_not_end(awaited):
    """Rank 1's MPI gets no answer, and rank 0's waits for it; both without an end of their own."""
    awaited(deaf_mpi)


def test_no_mpi_library(awaited):
    """If the chief has ended before the other one comes, that one finds nobody."""
    awaited(no_mpi)
