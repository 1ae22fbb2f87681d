"""Training that was killed, also in the middle of a backup, resumes from a whole one."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.multiprocess import harness

PROGRAM = harness.PROGRAMS / "backup_killed.py"
OWN_STEPS = harness.PROGRAMS / "backup_own_steps.py"

# What is renamed: the weights (1), their backup (2), the epoch for Keras (3); in the second epoch the weights (4), the
# backup before (5), the backup (6), the epoch (7).
GOES_ON = {"5": "EPOCHS 1 2 3", "6": "EPOCHS 1 2 3", "7": "EPOCHS 2 3"}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """How each training, killed and started again, ended; at the same time, as each is one process."""

    folder = tmp_path_factory.mktemp("killed")

    def run(kill):
        backup = str(folder / kill)
        with harness.started([str(PROGRAM), backup], 1, {"TEST_KILL": kill}) as processes:
            assert processes.wait()[0].code == -signal.SIGKILL, processes.outputs()
        return harness.run([str(PROGRAM), backup], 1)[0]

    with ThreadPoolExecutor() as threads:
        return {kill: threads.submit(run, kill) for kill in GOES_ON}


@pytest.mark.multiprocess
@pytest.mark.parametrize("kill", GOES_ON)
def test_training_killed_during_backup_resumes(kill, resumed):
    assert GOES_ON[kill] in resumed[kill].result().output


@pytest.mark.multiprocess
@pytest.mark.parametrize(("model", "kill"), [("OwnStep", "1"), ("GAN", "0")])
def test_optimizers_of_custom_step_are_restored_on_all_ranks(model, kill, tmp_path):
    """All ranks resume with the chief's weights and optimizers, whichever rank was killed."""
    command = [str(OWN_STEPS), model, str(tmp_path)]
    with harness.started(command, 2, {"TEST_KILL": kill}) as processes:
        ended = processes.wait()
        assert ended[int(kill)].code == -signal.SIGKILL, processes.outputs()
        assert ended[1 - int(kill)].code != 0, processes.outputs()
    for end in harness.run(command, 2):
        assert "EPOCHS 2 3\n" in end.output
