"""Groups of processes that train at the same time, in one job."""

import signal

import pytest

from tests.multiprocess import harness
from tfdist.collectives.cost import TYPICAL
from tfdist.engine import calibration

pytestmark = pytest.mark.multiprocess


def test_two_pairs_train_different_models():
    ends = harness.run([str(harness.PROGRAMS / "pairs.py")], 4)
    writers = [end.output.rpartition("DONE ")[2].split()[0] for end in ends]
    assert writers == ["True", "False", "False", "True"], writers  # the first of each pair
    harness.assert_nothing_left()


def test_groups_train_as_plain_keras_does(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setenv(calibration.VARIABLE, str(path))  # of the whole job, and used in all of its groups
    calibration.store(TYPICAL, calibration.machine((0, 0, 0, 0)))
    program = [str(harness.PROGRAMS / "groups.py"), str(tmp_path)]
    harness.run(program, 4, settings={calibration.VARIABLE: str(path)})
    harness.assert_nothing_left()


def test_one_pair_goes_on_when_a_rank_of_the_other_is_killed():
    program = [str(harness.PROGRAMS / "pairs.py")]
    with harness.started(program, 4, {"TEST_KILL": "1"}) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
        assert [end.code for end in ended] == [1, -signal.SIGKILL, 0, 0], outputs
        assert "LOST rank 1, worker 1" in ended[0].output, outputs
        for end in ended[2:]:
            assert "SURVIVED" in end.output, outputs
            assert "OF ALL rank" in end.output, outputs
            assert "This process goes on with its groups without it." in end.output, outputs
    harness.assert_nothing_left()


def test_a_rank_goes_on_with_its_other_group_when_one_has_lost_a_member():
    with harness.started([str(harness.PROGRAMS / "overlapping.py")], 3) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
        assert [end.code for end in ended] == [0, -signal.SIGKILL, 0], outputs
        assert "LOST rank 1, worker 1" in ended[0].output, outputs
        assert "PeerLostError: rank 1, worker 1" in ended[0].output.partition("IN A GRAPH")[2], outputs
        assert "LOST" not in ended[2].output, outputs
        for end in (ended[0], ended[2]):
            assert "DONE" in end.output, outputs
    harness.assert_nothing_left()


def test_a_loss_that_no_call_has_raised_is_an_error_at_the_end():
    with harness.started([str(harness.PROGRAMS / "overlapping.py")], 3, {"TEST_UNNOTICED": "1"}) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
        assert [end.code for end in ended] == [1, -signal.SIGKILL, 0], outputs
        assert "the job failed after this rank's script had ended: rank 1, worker 1" in ended[0].output, outputs
    harness.assert_nothing_left()
