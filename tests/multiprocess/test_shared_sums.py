"""Sums in memory that processes share, and what becomes of them when a rank dies, leaves, or is late."""

import signal

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep
from tfdist.engine import machine_code

PROGRAM = str(harness.PROGRAMS / "shared_sums.py")
CHECKS = [
    "bits",
    "blocks",
    "edges",
    "inputs",
    "models",
    "several",
    "buckets",
    "within_steps",
    "counts",
    "moments",
    "traffic",
    "recorded",
]

needs_machine_code = pytest.mark.skipif(machine_code.path() is None, reason="tfdist was installed without a C compiler")
pytestmark = [pytest.mark.multiprocess, needs_machine_code]


@checks({2: [sweep(check) for check in CHECKS], 3: CHECKS, 4: [sweep(check) for check in CHECKS]})
def test_sums_are_those_of_a_ring(size, check, passes):
    passes(size, check)


def ended_with(text, check, kill=False, codes=(1, 1), **settings):
    with harness.started([PROGRAM], 2, {"TEST_CASES": check, **settings}) as processes:
        if kill:
            for rank in range(2):
                processes.await_output(rank, "READY")
            processes.signal(1, signal.SIGKILL)
        ended = processes.wait()
        assert tuple(end.code for end in ended) == codes, processes.outputs()
        assert text in ended[0].output, processes.outputs()
    harness.assert_nothing_left()


def test_killed_rank_is_named():
    ended_with("PeerLostError: rank 1, worker 1", "forever", kill=True, codes=(1, -signal.SIGKILL))


def test_rank_that_has_ended_is_named():
    ended_with("has ended its script without it", "ended", codes=(1, 0))


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("different_shapes", "MismatchError: ranks sum tensors of different shapes"),
        ("different_at_first", "float32 (2, 3)"),
    ],
)
def test_different_shapes_raise(check, text):
    ended_with(text, check)


def test_late_rank_is_named_and_the_job_goes_on():
    settings = {"TEST_CASES": "late", "TFDIST_STALL_TIMEOUT": "1"}
    for end in harness.run([PROGRAM], 2, settings):
        assert "rank 0 has posted summed: shared sum of 1 float32 #0 (call 3: 1 of 1); missing: rank 1." in end.output
        assert "is in no collective; it has not posted summed: shared sum of 1 float32 #0." in end.output
        assert "DONE" in end.output
