"""A process that is killed while it writes a backup goes on from a whole one."""

import signal

import pytest

from tests.multiprocess import harness

PROGRAM = harness.PROGRAMS / "backup_killed.py"

# What is renamed: the weights (1), their backup (2), the epoch for Keras (3); in the second epoch the weights (4), the
# backup before (5), the backup (6), the epoch (7).
GOES_ON = {"5": "EPOCHS 1 2 3", "6": "EPOCHS 1 2 3", "7": "EPOCHS 2 3"}


@pytest.mark.multiprocess
@pytest.mark.parametrize("kill", GOES_ON)
def test_killed_in_a_backup(kill, tmp_path):
    backup = str(tmp_path / "backup")
    with harness.started([str(PROGRAM), backup], 1, {"TEST_KILL": kill}) as processes:
        assert processes.wait()[0].code == -signal.SIGKILL, processes.outputs()
    (ended,) = harness.run([str(PROGRAM), backup], 1)
    assert GOES_ON[kill] in ended.output
