"""Ctrl-Z and `fg`, on `tfdist run` and what it started."""

import ctypes
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.multiprocess import harness

TGKILL = {"x86_64": 234, "aarch64": 131}[platform.machine()]
"""The number of Linux's system call that sends a signal to one thread."""

pytestmark = pytest.mark.multiprocess


def until(condition, what, launcher):
    end = time.monotonic() + harness.DEADLINE
    while not condition():
        if launcher.poll() is not None or time.monotonic() > end:
            launcher.kill()
            pytest.fail(f"{what}; the launcher ended with {launcher.wait()} and printed:\n{launcher.stderr.read()}")
        time.sleep(0.02)


def stopped(pid):
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] == "T"


def signal_another_thread(launcher):
    """Ctrl-Z's signal, as when the kernel chooses another thread than the main one, which waits."""
    libc = ctypes.CDLL(None, use_errno=True)
    thread = next(int(name) for name in os.listdir(f"/proc/{launcher.pid}/task") if int(name) != launcher.pid)
    assert libc.syscall(TGKILL, launcher.pid, thread, int(signal.SIGTSTP)) == 0, ctypes.get_errno()


def test_ctrl_z_stops_the_ranks_as_well_and_fg_continues_them(tmp_path):
    """For longer than a silent rank is waited for."""
    command = [sys.executable, "-m", "tfdist.cli", "run", "-n", "2", str(harness.PROGRAMS / "endless_sums.py")]
    env = harness.environment(TEST_FOLDER=str(tmp_path), TFDIST_HEARTBEAT_TIMEOUT="4")
    launcher = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "the ranks did not start", launcher)
        pids = [launcher.pid, *(int((tmp_path / str(rank)).read_text()) for rank in range(2))]
        for send in (lambda: launcher.send_signal(signal.SIGTSTP), lambda: signal_another_thread(launcher)):
            send()
            until(lambda: all(map(stopped, pids)), "not all are stopped", launcher)
            time.sleep(6)
            launcher.send_signal(signal.SIGCONT)
            until(lambda: not any(map(stopped, pids)), "not all go on", launcher)
        (tmp_path / "stop").touch()
        assert launcher.wait(harness.DEADLINE) == 0, launcher.stderr.read()
    finally:
        launcher.kill()
        launcher.wait()
    harness.assert_nothing_left()


def test_a_closed_terminal_ends_a_training(tmp_path):
    """SIGHUP, which MPI's libraries must not have handlers for."""
    command = [sys.executable, "-m", "tfdist.cli", "run", "-n", "2", str(harness.PROGRAMS / "endless_sums.py")]
    env = harness.environment(TEST_FOLDER=str(tmp_path))
    launcher = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "the ranks did not start", launcher)
        launcher.send_signal(signal.SIGHUP)
        _, told = launcher.communicate(timeout=harness.DEADLINE)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 128 + signal.SIGHUP, told
    assert told.splitlines()[-1] == "tfdist run: ended by SIGHUP, as were the processes.", told
    harness.assert_nothing_left()


def test_ctrl_c_prints_one_line_per_rank(tmp_path):
    """And one of the launcher: nobody has failed, and no rank's last output is shown."""
    script = harness.PROGRAMS / "endless_sums.py"
    command = [sys.executable, "-m", "tfdist.cli", "run", "-n", "2", "--output", "all", str(script)]
    env = harness.environment(TEST_FOLDER=str(tmp_path))
    launcher = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        until(lambda: all((tmp_path / str(rank)).exists() for rank in range(2)), "the ranks did not start", launcher)
        launcher.send_signal(signal.SIGINT)
        _, told = launcher.communicate(timeout=harness.DEADLINE)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 128 + signal.SIGINT, told
    lines = told.splitlines()
    for rank in range(2):
        rank_lines = [line for line in lines if line.startswith(f"[rank {rank}]") and "training on 2" not in line]
        assert len(rank_lines) == 1, told
        assert re.search(rf"rank {rank} (was interrupted|ended) at {script}:\d+", rank_lines[0]), told
    assert lines[-1] == "tfdist run: ended by SIGINT (Ctrl-C), as were the processes."
    assert len(lines) == 4, told
