"""`tfdist run` with real processes; scripts that need no TensorFlow, so that they start at once."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess import harness
from tests.multiprocess.harness import tfdist

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return str(path)

    return write


RANK = "import json, os, sys, time, signal; rank = json.loads(os.environ['TF_CONFIG'])['task']['index']\n"


def test_each_process_gets_its_own_rank_and_cores(script):
    path = script(
        RANK + "print(json.dumps([rank, sys.argv[1:], os.environ['TFDIST_SECRET'], os.environ['TF_CONFIG'],"
        "sorted(os.sched_getaffinity(0))]))"
    )
    ended = tfdist("run", "-n", "2", "--output", "all", "--timeline", "out.json", path, "--flag", "value")
    assert ended.returncode == 0, ended.stderr
    assert "out.json: no rank has recorded a collective" in ended.stderr
    entries = sorted(json.loads(line.split("] ", 1)[1]) for line in ended.stdout.splitlines())
    assert [entry[0] for entry in entries] == [0, 1]
    assert entries[0][1] == ["--flag", "value"]
    assert entries[0][2] == entries[1][2] != ""
    clusters = [json.loads(entry[3])["cluster"] for entry in entries]
    assert clusters[0] == clusters[1]
    if len(os.sched_getaffinity(0)) >= 2:
        assert not set(entries[0][4]) & set(entries[1][4]), "two processes share a core"


def test_a_secret_that_is_set_is_the_jobs(script, tmp_path):
    """So that `tfdist status` in the same shell knows it."""
    path = script("import os; print(os.environ['TFDIST_SECRET'])")
    assert tfdist("run", "-n", "1", path, TFDIST_SECRET="a secret of mine").stdout == "a secret of mine\n"
    ended = tfdist("run", "-n", "1", path, TFDIST_SECRET_FILE=str(tmp_path / "none"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("tfdist run: TFDIST_SECRET_FILE: cannot read"), ended.stderr
    assert "Traceback" not in ended.stderr


def test_module_runs_with_all_cores(script, tmp_path):
    Path(script(RANK + "print('may use', sorted(os.sched_getaffinity(0)))"))
    options = ["--processes", "2", "--cores", "all", "--output", "all", "--module", "script"]
    ended = tfdist("run", *options, PYTHONPATH=str(tmp_path))
    assert ended.stdout.count(f"may use {sorted(os.sched_getaffinity(0))}") == 2, ended.stdout + ended.stderr


def test_more_processes_than_cores_can_run(script):
    count = len(os.sched_getaffinity(0)) + 1
    ended = tfdist("run", "-n", str(count), "--output", "all", script(RANK + "print('up', rank)"))
    assert ended.returncode == 0
    assert ended.stdout.count("up") == count


def test_only_the_chiefs_output_is_shown(script):
    ended = tfdist("run", "-n", "3", script(RANK + "print('this is', rank)"))
    assert ended.stdout == "this is 0\n"
    assert ended.stderr == ""


def test_exit_code_of_a_failed_rank_is_returned(script):
    assert tfdist("run", "-n", "2", script(RANK + "sys.exit(7 if rank == 0 else 0)")).returncode == 7


def test_victims_are_not_blamed(script, tmp_path):
    """Rank 0 ends first, and says that it does so because of another; rank 1 ends when rank 0 is gone."""
    path = script(
        RANK + f"import pathlib\nmark = pathlib.Path({str(tmp_path)!r}, 'mark')\n"
        "if rank == 0:\n"
        "    os.write(int(os.environ['TFDIST_REPORT_FD']), b'a victim')\n"
        "    pathlib.Path(str(mark) + '.new').write_text(str(os.getpid())); os.rename(str(mark) + '.new', mark)\n"
        "    sys.exit(1)\n"
        "while not mark.exists() or pathlib.Path('/proc', mark.read_text()).exists(): time.sleep(0.01)\n"
        "sys.exit(5)"
    )
    ended = tfdist("run", "-n", "2", path)
    assert ended.returncode == 5, ended.stderr
    assert "rank 1" in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1])
def test_signals_are_passed_on(script, tmp_path, number):
    path = script(
        RANK + "import pathlib\n"
        f"signal.pthread_sigmask(signal.SIG_BLOCK, [{int(number)}])\n"  # so that none arrives before `sigwait`
        f"pathlib.Path({str(tmp_path)!r}, str(rank)).write_text('up')\n"
        f"signal.sigwait([{int(number)}])"
    )
    launcher = subprocess.Popen([sys.executable, "-m", "tfdist.cli", "run", "-n", "2", path], env=harness.environment())
    try:
        _await_files(tmp_path, 2)
        launcher.send_signal(number)
        assert launcher.wait(harness.DEADLINE) == 0
    finally:
        launcher.kill()
        launcher.wait()


def test_what_the_launcher_was_told_to_ignore_ends_nothing(script, tmp_path):
    """As under nohup."""
    path = script(
        RANK + "import pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, str(rank)).write_text('up')\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "signal.sigwait([signal.SIGTERM])"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-m", "tfdist.cli", "run", "-n", "2", path],
        env=harness.environment(),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    try:
        _await_files(tmp_path, 2)
        launcher.send_signal(signal.SIGHUP)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(harness.DEADLINE) == 0
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(script, tmp_path, closed):
    path = script(RANK + "print('out'); print('err', file=sys.stderr); sys.exit(3 * rank)")
    command = f"{sys.executable} -m tfdist.cli run -n 2 --output all {path} {closed}"
    ended = subprocess.run(command, shell=True, env=harness.environment(), timeout=harness.DEADLINE, check=False)
    assert ended.returncode == 3


def test_nothing_survives_the_launcher(script, tmp_path):
    path = script(
        RANK
        + f"import pathlib\npathlib.Path({str(tmp_path)!r}, str(rank)).write_text(str(os.getpid()))\ntime.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-m", "tfdist.cli", "run", "-n", "2", path], env=harness.environment())
    _await_files(tmp_path, 2)
    launcher.kill()
    launcher.wait()
    end = time.monotonic() + 30
    for rank in range(2):
        pid = (tmp_path / str(rank)).read_text()
        while Path("/proc", pid).exists() and "Z" not in Path("/proc", pid, "stat").read_text().split()[2]:
            assert time.monotonic() < end, f"rank {rank} is still there"
            time.sleep(0.02)


def _await_files(folder, count):
    end = time.monotonic() + harness.DEADLINE
    while sum(path.name.isdigit() and path.stat().st_size > 0 for path in folder.iterdir()) < count:
        assert time.monotonic() < end, "the processes did not start"
        time.sleep(0.02)


def test_missing_scripts_and_invalid_counts_are_refused():
    ended = tfdist("run", "-n", "2", "no_such_script.py")
    assert ended.returncode == 2
    assert "there is no file no_such_script.py" in ended.stderr
    ended = tfdist("run", "-np", "2", "python", "train.py", "--epochs=3")  # as Horovod has it
    assert ended.returncode == 2
    assert "there is no file python; give the script without python: tfdist run … train.py --epochs=3" in ended.stderr
    ended = tfdist("run", "-n", "0", "x.py")
    assert ended.returncode == 2
    assert "expected a whole number of at least 1, got '0'" in ended.stderr


def test_the_kill_of_any_rank_leaves_nothing_behind():
    """While MPI starts: the moment in which its shared memory has a name."""
    program = str(harness.PROGRAMS / "die_at_start.py")
    for rank in (0, 1):
        for point in ("in_mpi_init", "after_mpi_init"):
            ended = tfdist("run", "-n", "2", program, TEST_POINT=point, TEST_POINT_RANK=str(rank))
            assert ended.returncode == 128 + signal.SIGKILL, ended.stderr
            assert f"rank {rank} (process" in ended.stderr, ended.stderr
            harness.assert_nothing_left()


def test_all_output_arrives_where_it_belongs(script):
    """Also the last lines, and a line without an end, although a child in a session of its own holds the pipes."""
    path = script(
        RANK + "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print('child', child.pid)\n"
        "for number in range(2000): print('out', number); print('err', number, file=sys.stderr)\n"
        "sys.stdout.write('the end')"
    )
    for _ in range(5):
        ended = tfdist("run", "-n", "3", "--output", "all", path)
        for pid in re.findall(r"child (\d+)", ended.stdout):
            os.kill(int(pid), signal.SIGKILL)
        assert ended.returncode == 0
        for rank in range(3):
            out, err = (
                [line for line in text.splitlines() if line.startswith(f"[rank {rank}]")]
                for text in (ended.stdout, ended.stderr)
            )
            assert out[1:] == [*(f"[rank {rank}] out {number}" for number in range(2000)), f"[rank {rank}] the end"]
            assert err == [f"[rank {rank}] err {number}" for number in range(2000)]


def test_undecodable_bytes_and_progress_bars_are_shown(script):
    path = script(RANK + "sys.stdout.buffer.write(b'\\xff\\xfe\\n1/2\\r2/2\\r\\nx\\n')")
    ended = subprocess.run(
        [sys.executable, "-m", "tfdist.cli", "run", "-n", "1", "--output", "all", path],
        env=harness.environment(PYTHONIOENCODING="ascii"),
        capture_output=True,
        timeout=harness.DEADLINE,
        check=False,
    )
    assert ended.stdout == b"[rank 0] \xff\xfe\n[rank 0] 1/2\n[rank 0] 2/2\n[rank 0] x\n", ended


def test_a_reader_that_goes_away_ends_the_job(script):
    """As `python script.py | head -1` does."""
    path = script(RANK + "while True: print('again')")
    command = f"{sys.executable} -m tfdist.cli run -n 2 --output all {path} | head -1"
    ended = subprocess.run(
        command,
        shell=True,
        env=harness.environment(),
        capture_output=True,
        text=True,
        timeout=harness.DEADLINE,
        check=False,
    )
    assert "BrokenPipeError" in ended.stderr
    assert "exited with code" in ended.stderr


def test_omitted_lines_are_mentioned_and_kept_with_logs(script, tmp_path):
    path = script(RANK + "for number in range(1000): print('line', number)\nsys.exit(rank)")
    ended = tfdist("run", "-n", "2", path)
    lines = ended.stderr.splitlines()
    assert lines[0] == (
        "tfdist run: the last 400 lines of rank 1, without 600 earlier ones; "
        "--logs FOLDER keeps all of them, --output all shows them:"
    )
    assert lines[1:401] == [f"[rank 1] line {number}" for number in range(600, 1000)]
    ended = tfdist("run", "-n", "2", "--logs", str(tmp_path / "logs"), path)
    whole = tmp_path / "logs" / "rank-1.log"
    assert f"all of them are in {whole}:" in ended.stderr
    assert whole.read_text().splitlines() == [f"line {number}" for number in range(1000)]


RESTARTED = """
import os, signal, sys
from pathlib import Path
rank = os.environ["TF_CONFIG"].split('"index": ')[1][0]
mark = Path(sys.argv[1]) / rank
count = int(mark.read_text()) if mark.exists() else 0
mark.write_text(str(count + 1))
print("rank", rank, "for the", count, "th time", flush=True)
if rank == "1" and count < int(sys.argv[2]):
    os.kill(os.getpid(), signal.SIGKILL) if count else sys.exit(3)
"""


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 128 + 9)])
def test_failed_process_is_restarted_up_to_the_limit(tmp_path, failures, code):
    program = tmp_path / "program.py"
    program.write_text(RESTARTED)
    arguments = ["--restarts", "2", "--output", "all", str(program), str(tmp_path), str(failures)]
    ended = harness.tfdist("run", "-n", "2", *arguments)
    assert ended.returncode == code, ended.stdout + ended.stderr
    assert "exited with code 3; it is started again (1 of 2)." in ended.stderr
    assert "was killed by SIGKILL; it is started again (2 of 2)." in ended.stderr
    assert (tmp_path / "1").read_text() == "3"
    assert (tmp_path / "0").read_text() == "1"
    assert "[rank 1] rank 1 for the 2 th time" in ended.stdout


ENDED = """
import os, sys, time
from tfdist.cluster import launcher
rank = os.environ["TF_CONFIG"].split('"index": ')[1][0]
mark = sys.argv[1] + "/again"
if rank == "1":
    if not os.path.exists(mark):
        open(mark, "w").close()
        sys.exit(3)
    open(sys.argv[1] + "/waits", "w").close()
    time.sleep(300)  # for a job that is over
while not os.path.exists(sys.argv[1] + "/waits"):
    time.sleep(0.01)
launcher.report_to_launcher(launcher.ENTERED)
"""


def test_restarted_process_is_ended_when_training_is_over(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ENDED)
    ended = harness.tfdist("run", "-n", "3", "--restarts", "2", str(program), str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "rank 1 was started again, but the training has ended." in ended.stderr
