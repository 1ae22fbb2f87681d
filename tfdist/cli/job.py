"""The processes of one `tfdist run`: how they start, what they tell, who is to blame, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tfdist.cli import resources
from tfdist.cli.outputs import Outputs
from tfdist.cluster import launcher
from tfdist.comm import segments

GRACE_SECONDS = 5.0
"""For the other processes to notice, and say in their own words, that one of them is gone."""

END_SECONDS = 15.0
"""For a process that has said that it failed to end, before the same is done as if it had ended."""

TERM_SECONDS = 3.0
"""Between asking a process to end and ending it."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass
class Process:
    """One rank.

    Attributes:
        rank: its rank.
        popen: the process, the leader of a group of its own.
        report: where it says how it came to fail; see `tfdist.cluster.launcher.tell`.
        is_victim: whether it said that another one's failure was the cause.
        ended_by_us: whether it had to be ended.
    """

    rank: int
    popen: subprocess.Popen[bytes]
    report: int
    is_victim: bool = False
    ended_by_us: bool = False

    def said(self) -> set[str]:
        """What it has said since the last time."""
        try:
            return set(os.read(self.report, 4096).decode(errors="replace").splitlines())
        except BlockingIOError:
            return set()

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            pass


class Job:
    """The processes of one run.

    Args:
        command: what each of them executes.
        size: how many there are.
        share_cores: whether each gets cores of its own.
        show_all: whether every rank's output is shown.
        log_folder: where the whole output of ranks that are not shown is written.
        keep_going: whether the other processes are left to themselves when one fails.
    """

    def __init__(
        self,
        command: list[str],
        size: int,
        share_cores: bool,
        show_all: bool,
        log_folder: str | None = None,
        keep_going: bool = False,
    ) -> None:
        self._command = command
        self._size = size
        self._share_cores = share_cores
        self._show_all = show_all
        self._log_folder = log_folder
        self._keep_going = keep_going
        self._outputs = Outputs(log_folder)
        self._processes: list[Process] = []
        self._ended, self._ending = os.pipe()

    def run(self) -> int:
        """Starts the processes and waits for them."""
        begun = time.time()
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        signal.signal(signal.SIGTSTP, self._stop)
        ports, secret = _free_ports(self._size), secrets.token_hex(16)
        try:
            for rank in range(self._size):
                self._processes.append(self._start(rank, ports, secret))
            self._outputs.start()
            blamed = self._wait()
        finally:
            for process in self._processes:
                process.signal(signal.SIGKILL)  # whatever a script left behind in its group
                process.popen.wait()
            self._outputs.finish()
            segments.sweep(begun)
        return self._report(blamed) if blamed else 0

    def _start(self, rank: int, ports: list[int], secret: str) -> Process:
        environment = dict(os.environ)
        environment["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]},
                "task": {"type": "worker", "index": rank},
            }
        )
        environment["TFDIST_SECRET"] = secret
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        cores = resources.cores_of(rank, self._size) if self._share_cores else None
        environment.update(resources.thread_pools(self._size if self._share_cores else 1, cores))
        environment.update(resources.gpu_of(rank))
        report, tell = os.pipe()
        os.set_blocking(report, False)
        environment[launcher.REPORT] = str(tell)
        with self._pipes(rank) as (stdout, stderr):
            popen = subprocess.Popen(
                self._command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=[tell],
                start_new_session=True,
                preexec_fn=resources.at_start(cores),
            )
        os.close(tell)
        threading.Thread(target=self._watch, args=(rank, popen), daemon=True).start()
        return Process(rank, popen, report)

    @contextlib.contextmanager
    def _pipes(self, rank: int) -> Iterator[tuple[int | None, int | None]]:
        """What a process writes to: the launcher's own outputs, a pipe for each of them, or one for both."""
        if rank == 0 and not self._show_all:
            yield None, None
            return
        ends = [os.pipe() for _ in range(2 if self._show_all else 1)]
        if self._show_all:
            self._outputs.show(rank, ends[0][0], sys.stdout.buffer)
            self._outputs.show(rank, ends[1][0], sys.stderr.buffer)
        else:
            self._outputs.keep(rank, ends[0][0])
        try:
            yield ends[0][1], ends[-1][1]
        finally:
            for _, writing in ends:
                os.close(writing)

    def _watch(self, rank: int, popen: subprocess.Popen[bytes]) -> None:
        popen.wait()
        os.write(self._ending, rank.to_bytes(4, "little"))

    def _wait(self) -> list[Process]:
        """Waits for all; ends what is left soon after one has failed, unless it is to keep going.

        Returns:
            The process to be blamed first, then others whose output helps; none if all succeeded.
        """
        selector = selectors.DefaultSelector()
        selector.register(self._ended, selectors.EVENT_READ)
        for process in self._processes:
            selector.register(process.report, selectors.EVENT_READ, process)
        running = set(range(self._size))
        failed: list[Process] = []  # in the order in which it became known
        causes: list[Process] = []
        deadline: float | None = None
        while running:
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                self._end(running)
                deadline = timeout = None
            for key, _ in selector.select(timeout):
                if key.data is None:
                    process = self._processes[int.from_bytes(os.read(self._ended, 4), "little")]
                    running.discard(process.rank)
                    _hear(process, causes)
                    if process.popen.returncode == 0:
                        continue
                    failed.append(process)
                    if not process.is_victim and not process.ended_by_us and process not in causes:
                        causes.append(process)
                elif not _hear(process := key.data, causes):
                    selector.unregister(process.report)
                is_ending = any(p.ended_by_us for p in self._processes)
                if (failed or causes) and not is_ending and not self._keep_going:
                    latest = time.monotonic() + (GRACE_SECONDS if failed else END_SECONDS)
                    deadline = latest if deadline is None else min(deadline, latest)
        selector.close()
        if causes or not failed:
            return causes[:1]
        # All that ended by themselves say that another was the cause: one that never said anything, if there is one.
        silent = [process for process in failed if not process.is_victim]
        victims = [process for process in failed if process.is_victim]
        return [*silent[:1], *victims[:1]]

    def _end(self, running: set[int]) -> None:
        for rank in running:
            self._processes[rank].ended_by_us = True
            self._processes[rank].signal(signal.SIGTERM)
        end = time.monotonic() + TERM_SECONDS
        for rank in running:
            try:
                self._processes[rank].popen.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._processes[rank].signal(signal.SIGKILL)

    def _report(self, blamed: list[Process]) -> int:
        """Says who failed; returns the exit code of the job."""
        for process in reversed(blamed):
            self._show_kept(process.rank)
        process = blamed[0]
        code = process.popen.returncode
        if process.ended_by_us:
            how = "stood still, or failed and did not end by itself"
            code = 1 if blamed[-1].ended_by_us else blamed[-1].popen.returncode
        else:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        others = "left to themselves" if self._keep_going else "ended"
        rest = "" if self._size == 1 else f"; the other processes were {others}"
        _say(f"tfdist run: rank {process.rank} (process {process.popen.pid}) {how}{rest}.")
        return 128 - code if code < 0 else code

    def _show_kept(self, rank: int) -> None:
        kept = self._outputs.kept.get(rank)
        if kept is None:
            return
        if earlier := kept.count - len(kept.lines):
            where = (
                f"all of them are in {self._outputs.log_path(rank)}"
                if self._log_folder
                else "--logs FOLDER keeps all of them, --output all shows them"
            )
            _say(
                f"tfdist run: the last {len(kept.lines)} lines of rank {rank}, without {earlier} earlier ones; {where}:"
            )
        for line in kept.lines:
            sys.stderr.buffer.write(b"[rank %d] %b" % (rank, line))
        sys.stderr.buffer.flush()

    def _pass_on(self, number: int, frame: Any) -> None:
        for process in self._processes:
            process.signal(number)

    def _stop(self, number: int, frame: Any) -> None:
        """Ctrl-Z. The processes have no terminal, and the kernel stops such by SIGSTOP only."""
        self._pass_on(signal.SIGSTOP, frame)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # stops here, until SIGCONT
        signal.signal(number, self._stop)
        self._pass_on(signal.SIGCONT, frame)


def _hear(process: Process, causes: list[Process]) -> bool:
    """Reads what a process reports of its failure; False when it reported nothing."""
    said = process.said()
    process.is_victim = process.is_victim or launcher.VICTIM in said
    if launcher.CAUSE in said and process not in causes:
        causes.append(process)
    return bool(said)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
