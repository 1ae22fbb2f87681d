"""Groups of processes that train at the same time, in one job."""

import signal

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess


def test_two_pairs_train_different_models():
    ends = harness.run([str(harness.PROGRAMS / "pairs.py")], 4)
    writers = [end.output.rpartition("DONE ")[2].split()[0] for end in ends]
    assert writers == ["True", "False", "False", "True"], writers  # the first of each pair
    harness.assert_nothing_left()


def test_one_pair_goes_on_when_a_rank_of_the_other_is_killed():
    program = [str(harness.PROGRAMS / "pairs.py")]
    with harness.started(program, 4, {"TEST_KILL": "1"}) as processes:
        ended = processes.wait(240)
        outputs = processes.outputs()
        assert [end.code for end in ended] == [1, -signal.SIGKILL, 0, 0], outputs
        assert "LOST rank 1, worker 1" in ended[0].output, outputs
        for end in ended[2:]:
            assert "SURVIVED" in end.output, outputs
            assert "OF ALL rank" in end.output, outputs
            assert "This process shares no group with it, and goes on." in end.output, outputs
    harness.assert_nothing_left()
