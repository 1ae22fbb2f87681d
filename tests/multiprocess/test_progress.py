"""What hangs is noticed, and what is slow is not; and what is then told."""

import sys
import time

import pytest

from tests import failures
from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess

IN_A_CHILD = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


@pytest.mark.parametrize("command", [["import time; time.sleep(600)"], [IN_A_CHILD, "import time; time.sleep(600)"]])
def test_idle_silent_process_counts_as_hanging(command):
    with (
        harness.started(["-c", *command], 1) as processes,
        pytest.raises(AssertionError, match=r"ranks \{0\} hang: they stand still"),
    ):
        processes.wait(still=1.0)


COMPUTES = "import time\nend = time.monotonic() + 3\nwhile time.monotonic() < end: pass"
WRITES = "import time\nfor number in range(30): print(number); time.sleep(0.1)"


@pytest.mark.parametrize("command", [[COMPUTES], [WRITES], [IN_A_CHILD, COMPUTES]], ids=["computes", "writes", "child"])
def test_computing_or_writing_process_does_not_count_as_hanging(command):
    with harness.started(["-c", *command], 1) as processes:
        (end,) = processes.wait(still=2.0)
    assert end.code == 0


def test_a_command_that_hangs_is_ended():
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="they stand still"):
        harness.completed([sys.executable, "-c", "import time; print('begun'); time.sleep(600)"], {}, still=1.0)
    assert time.monotonic() - begin < harness.DEADLINE


def test_ports_are_free_and_given_once():
    ports = harness.free_ports(100)
    assert len(set(ports + harness.free_ports(100))) == 200
    assert max(ports) < 32768, "where Linux begins to choose ports of connections"


def test_output_of_original_failure_comes_first():
    script = "import sys; text, code = sys.argv[1:]; print(text); sys.exit(int(code))"
    with harness.started(["-c", script, "PeerLostError: rank 1", "1"], 1) as victim:
        victim.wait()
    with harness.started(["-c", script, "ValueError: boom", "1"], 1) as culprit:
        culprit.wait()
    both = harness.Processes(victim.popens + culprit.popens, [])
    both._kept = [victim.output(0), culprit.output(0)]
    assert both.outputs().splitlines()[:2] == ["--- rank 1 ---", "ValueError: boom"]


def test_long_reports_are_shortened():
    """To the ends of what pytest says and of each rank's output, the first rank's at length."""
    ranks = [
        f"--- rank {rank} ---\n" + "\n".join(f"line {number} of {rank}" for number in range(200)) for rank in (2, 0, 1)
    ]
    text = "\n".join([*(f"source {number}" for number in range(100)), "E   AssertionError", *ranks])
    lines = failures.shortened(text, 59).splitlines()
    assert len(lines) <= 59
    assert "E   AssertionError" in lines
    assert [line for line in lines if line.startswith("---")] == ["--- rank 2 ---", "--- rank 0 ---", "--- rank 1 ---"]
    assert [sum(line.endswith(f" of {rank}") for line in lines) for rank in (2, 0, 1)] == [18, 8, 8]
    assert lines[-1] == "line 199 of 1"
    assert failures.shortened("short", 59) == "short"
