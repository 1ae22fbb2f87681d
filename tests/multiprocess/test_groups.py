"""Groups of processes that train at the same time, in one job."""

import signal

import pytest

from tests.multiprocess import harness
from tests.multiprocess.conftest import checks
from tests.sweeps import sweep

pytestmark = pytest.mark.multiprocess

PROGRAM = str(harness.PROGRAMS / "groups.py")
CHECKS = [
    "arrays",
    "words",
    "scaled_loss",
    "own_loop",
    "interrupted",
    "compressed",
    "lossy",
    "messages",
    "in_turn",
    "over_two_groups_in_one_graph",
    "edges",
    "broadcast",
]
IN_SWEEPS = ["scaled_loss", "compressed", "lossy"]
"""Which other tests have without groups; those of shares and of residuals are always run."""


@checks({4: [sweep(check) if check in IN_SWEEPS else check for check in CHECKS]})
def test_groups_train_as_plain_keras_does(size, check, passes):
    passes(size, check)


def test_two_pairs_train_different_models_and_one_goes_on_when_a_rank_of_the_other_is_killed():
    with harness.started([str(harness.PROGRAMS / "pairs.py")], 4) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
        writers = [end.output.rpartition("WRITES ")[2].split()[0] for end in ended]
        assert writers == ["True", "False", "False", "True"], outputs  # the first of each pair
        assert [end.code for end in ended] == [1, -signal.SIGKILL, 0, 0], outputs
        assert "LOST rank 1, worker 1" in ended[0].output, outputs
        for end in ended[2:]:
            assert "SURVIVED" in end.output, outputs
            assert "OF ALL rank" in end.output, outputs
            assert "This process goes on with the groups that do not contain that rank." in end.output, outputs
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


def test_unnoticed_death_of_rank_is_error_at_exit():
    with harness.started([str(harness.PROGRAMS / "overlapping.py")], 3, {"TEST_UNNOTICED": "1"}) as processes:
        ended = processes.wait()
        outputs = processes.outputs()
        assert [end.code for end in ended] == [1, -signal.SIGKILL, 0], outputs
        assert "the job failed after this rank's script had ended: rank 1, worker 1" in ended[0].output, outputs
    harness.assert_nothing_left()
