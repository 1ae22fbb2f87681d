"""Processes that do not end by themselves when another has failed: `tfdist run` ends them after a grace.

All jobs run at the same time, as they do nothing but wait for it. Their scripts need no TensorFlow.
"""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.cli.test_run import RANK
from tests.multiprocess import harness
from tests.multiprocess.harness import tfdist
from tfdist.cli.job import GRACE_SECONDS

pytestmark = pytest.mark.multiprocess

STAYS = "import threading; threading.Thread(target=threading.Event().wait).start()\n"
"""A thread that keeps the process from its end."""

SCRIPTS = {
    "fails": (2, "print('noise')\nif rank == 1: raise SystemExit('sorry')\ntime.sleep(600)"),
    "is killed": (2, "os.kill(os.getpid(), signal.SIGKILL) if rank == 1 else time.sleep(600)"),
    "is slow to end": (
        3,
        STAYS + "from tfdist.cluster import launcher\n"
        "launcher.report_to_launcher(launcher.CAUSE if rank == 1 else launcher.VICTIM)\n"
        "if rank == 0: os._exit(1)\n"
        "raise ValueError(f'of rank {rank}')",
    ),
    "stands still": (
        3,
        "from tfdist.cluster import launcher\n"
        "if rank == 1: print('I wait'); time.sleep(600)\n"
        "launcher.report_to_launcher(launcher.VICTIM)\n"
        "sys.exit(f'rank 1 is lost, says rank {rank}')",
    ),
}
"""By what rank 1 does: the number of processes, and what each of them runs."""


KEEPS_GOING = """
from pathlib import Path
folder = Path({folder!r})
if rank == 1: sys.exit(7)
while not (folder / 'end').exists(): time.sleep(0.01)
(folder / str(rank)).write_text('went on')
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """How each job ends, as futures; a process that sleeps on would outlast the deadline of `tfdist`."""
    folder = tmp_path_factory.mktemp("scripts")

    def script(name, text):
        path = folder / f"{name}.py"
        path.write_text(RANK + text)
        return str(path)

    def keep_going():
        path = script("keeps going", KEEPS_GOING.format(folder=str(folder)))
        with subprocess.Popen([sys.executable, "-m", "tfdist.cli", "run", "-n", "3", "--keep-going", path]) as popen:
            with pytest.raises(subprocess.TimeoutExpired):
                popen.wait(GRACE_SECONDS + 2)  # by then they would have been ended
            (folder / "end").touch()
            return popen.wait(harness.DEADLINE), [(folder / str(rank)).read_text() for rank in (0, 2)]

    with ThreadPoolExecutor(len(SCRIPTS) + 2) as threads:
        jobs = {
            what: threads.submit(tfdist, "run", "-n", str(count), script(what, text))
            for what, (count, text) in SCRIPTS.items()
        }
        jobs["keeps going"] = threads.submit(keep_going)
        program = str(harness.PROGRAMS / "endings.py")
        jobs["raises"] = threads.submit(tfdist, "run", "-n", "2", program, TEST_CASE="thread_that_stays")
    harness.assert_nothing_left()
    return jobs


def test_failing_rank_is_named_shown_and_its_code_passed_on(ended):
    job = ended["fails"].result()
    assert job.returncode == 1
    assert "[rank 1] sorry" in job.stderr
    assert "tfdist run: rank 1 (process" in job.stderr
    assert "exited with code 1" in job.stderr


def test_killed_rank_gives_its_signal_as_exit_code(ended):
    job = ended["is killed"].result()
    assert job.returncode == 128 + signal.SIGKILL
    assert "was killed by SIGKILL" in job.stderr


def test_cause_that_is_slow_to_end_is_named(ended):
    """With nothing of tfdist but what its hook tells the launcher: all ranks have a thread that stays."""
    job = ended["is slow to end"].result()
    assert job.returncode == 1, job.stderr
    assert "[rank 1] ValueError: of rank 1" in job.stderr
    assert "tfdist run: rank 1 (process" in job.stderr
    assert "hung, or failed and did not end by itself" in job.stderr
    assert "of rank 2" not in job.stderr


def test_rank_that_stands_still_is_named_with_what_the_others_say(ended):
    job = ended["stands still"].result()
    assert job.returncode == 1, job.stderr
    assert "[rank 1] I wait" in job.stderr
    assert "tfdist run: rank 1 (process" in job.stderr


def test_traceback_of_a_hung_cause_is_shown(ended):
    """The other rank is lost by it, and ends long before."""
    job = ended["raises"].result()
    assert "[rank 1] ValueError: a mistake" in job.stderr, job.stderr
    assert "tfdist run: rank 1 (process" in job.stderr, job.stderr


def test_keep_going_lets_other_ranks_continue(ended):
    """Long after one has failed: until they are told to end."""
    assert ended["keeps going"].result() == (7, ["went on", "went on"])
