"""Runs the processes of one `tfdist run`: starts them, reports which of them failed first, and ends them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
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
from pathlib import Path
from typing import Any

from tfdist.cli import resources, status_hint
from tfdist.cli.blame import FailureTracker
from tfdist.cli.outputs import Outputs
from tfdist.cli.process import Process
from tfdist.cluster import launcher
from tfdist.cluster.settings import read_secret
from tfdist.cluster.spec import Task
from tfdist.comm import segments

GRACE_SECONDS = 5.0
"""Seconds in which the other processes can notice and report by themselves that a process is gone."""

END_SECONDS = 15.0
"""Seconds in which a process that has reported a failure has to end; afterwards all processes are ended."""

TERM_SECONDS = 3.0
"""Seconds between asking a process to end and killing it."""

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_FIRST_PORT = 10_000


@dataclass(frozen=True)
class Roles:
    """The numbers of processes of a job, by role.

    Attributes:
        workers: number of training processes, which have ranks.
        servers: number of parameter servers.
        evaluators: number of evaluators.
    """

    workers: int
    servers: int = 0
    evaluators: int = 0

    def tasks(self) -> list[Task]:
        """Returns the tasks, with addresses on free ports of the loopback interface."""
        jobs = {"worker": self.workers, "ps": self.servers, "evaluator": self.evaluators}
        places = [(job, index) for job, count in jobs.items() for index in range(count)]
        ports = _free_ports(len(places))
        return [Task(job, index, f"127.0.0.1:{port}") for (job, index), port in zip(places, ports, strict=True)]


class Job:
    """The processes of one `tfdist run`.

    Training processes depend on each other: when one fails, the others are ended. The failure of a parameter server or
    an evaluator does not end them. When no training process is left, servers are ended, and the job waits for
    evaluators.

    Args:
        command: command line of each process.
        roles: number of processes of each role.
        share_cores: whether each process gets cores of its own.
        show_all: whether every process's output is shown.
        log_folder: folder for the whole output of processes that are not shown; None writes none.
        keep_going: whether the other training processes are left to themselves when one fails.
        restarts: number of times that a failed training process is started again, for all processes together.
    """

    def __init__(
        self,
        command: list[str],
        roles: Roles,
        share_cores: bool,
        show_all: bool,
        log_folder: str | None = None,
        keep_going: bool = False,
        restarts: int = 0,
    ) -> None:
        self._command = command
        self._roles = roles
        self._share_cores = share_cores
        self._show_all = show_all
        self._log_folder = log_folder
        self._keep_going = keep_going
        self._restarts = restarts
        self._restarted = 0
        self._asked_to_end_by: int | None = None
        self._outputs = Outputs(log_folder)
        self._processes: list[Process] = []
        self._ended, self._ending = os.pipe()

    def run(self) -> int:
        """Starts the processes and waits for them; returns the exit code of the job."""
        begun = time.time()
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup, which the processes inherit
                signal.signal(number, self._pass_on)
        signal.signal(signal.SIGTSTP, self._stop)
        self._tasks, self._secret = self._roles.tasks(), read_secret() or secrets.token_hex(16).encode()
        try:
            with status_hint.told(self._tasks, self._secret):
                for place in range(len(self._tasks)):
                    self._processes.append(self._start(place))
                self._outputs.start()
                with _woken_by_signals() as signals:
                    blamed = self._wait(signals)
        finally:
            for process in self._processes:
                process.signal(signal.SIGKILL)  # also processes that a script has left in its group
                process.popen.wait()
            self._outputs.finish()
            segments.sweep(begun)
        return self._report(blamed) if blamed else 0

    def _start(self, place: int) -> Process:
        tasks = self._tasks
        task = tasks[place]
        trains = task.job == "worker"
        name = f"rank {task.index}" if trains else f"{task.job} {task.index}"
        environment = dict(os.environ)
        environment["TF_CONFIG"] = _tf_config(task, tasks)
        environment["TFDIST_SECRET"] = os.fsdecode(self._secret)
        environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        cores = resources.cores_of(place, len(tasks)) if self._share_cores else None
        environment.update(resources.thread_pools(len(tasks) if self._share_cores else 1, cores))
        environment.update({"CUDA_VISIBLE_DEVICES": "-1"} if task.job == "ps" else resources.gpu_of(place))
        report, tell = os.pipe()
        os.set_blocking(report, False)
        environment[launcher.REPORT] = str(tell)
        with self._pipes(name, place) as (stdout, stderr):
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
        threading.Thread(target=self._watch, args=(place, popen), daemon=True).start()
        return Process(name, popen, report, trains)

    @contextlib.contextmanager
    def _pipes(self, name: str, place: int) -> Iterator[tuple[int | None, int | None]]:
        """Yields a process's stdout and stderr: those of the launcher (None), a pipe for each, or one pipe for both."""
        if place == 0 and not self._show_all:
            yield None, None
            return
        ends = [os.pipe() for _ in range(2 if self._show_all else 1)]
        if self._show_all:
            self._outputs.show(name, ends[0][0], sys.stdout.buffer)
            self._outputs.show(name, ends[1][0], sys.stderr.buffer)
        else:
            self._outputs.keep(name, ends[0][0])
        try:
            yield ends[0][1], ends[-1][1]
        finally:
            for _, writing in ends:
                os.close(writing)

    def _watch(self, place: int, popen: subprocess.Popen[bytes]) -> None:
        popen.wait()
        os.write(self._ending, place.to_bytes(4, "little"))

    def _wait(self, signals: socket.socket) -> list[Process]:
        """Waits for all processes. Ends the others soon after a training process has failed, unless ``keep_going``.

        Args:
            signals: socket that is readable when a signal has arrived, so that the signal's handler can run.

        Returns:
            The process to blame, then others whose output helps; an empty list if all succeeded.
        """
        selector = selectors.DefaultSelector()
        selector.register(signals, selectors.EVENT_READ)
        selector.register(self._ended, selectors.EVENT_READ)
        for process in self._processes:
            selector.register(process.report, selectors.EVENT_READ, process)
        blame = FailureTracker()
        running = self._processes.copy()
        deadline: float | None = None
        is_over = False
        while running:
            timeout = None if deadline is None else deadline - time.monotonic()
            if timeout is not None and timeout <= 0:
                has_failed = blame.is_known and not self._keep_going
                self._end(running if has_failed else [child for child in running if child.name.startswith("ps ")])
                deadline = timeout = None
            for key, _ in selector.select(timeout):
                if key.fileobj is signals:
                    signals.recv(64)
                elif key.data is None:
                    place = int.from_bytes(os.read(self._ended, 4), "little")
                    process = self._processes[place]
                    running.remove(process)
                    blame.hear(process)
                    if self._is_to_start_again(process):
                        blame.forget(process)
                        again = self._processes[place] = self._start(place)
                        again.is_restart = True
                        running.append(again)
                        selector.register(again.report, selectors.EVENT_READ, again)
                        deadline = deadline if blame.is_known else None
                        continue
                    blame.ended(process)
                    if not process.trains and process in blame.others:
                        _say(f"tfdist run: {_how_it_ended(process)}; the training goes on without it.")
                elif not blame.hear(process := key.data):
                    selector.unregister(process.report)
                is_ending = any(child.ended_by_us for child in self._processes)
                if blame.is_known and not is_ending and not self._keep_going:
                    latest = time.monotonic() + (GRACE_SECONDS if blame.failed else END_SECONDS)
                    deadline = latest if deadline is None else min(deadline, latest)
            if self._has_nobody_to_train_with(running):
                for process in running:
                    _say(f"tfdist run: {process.name} was started again, but the training has ended.")
                self._end(running)
                break
            if running and not is_over and not any(process.trains for process in running):
                is_over = True
                deadline = time.monotonic() + GRACE_SECONDS  # for servers, which may not end by themselves
                if evaluators := [child.name for child in running if child.name.startswith("evaluator ")]:
                    _say(f"tfdist run: the training has ended; waiting for {', '.join(evaluators)} (Ctrl-C ends it).")
        selector.close()
        return blame.processes()

    def _has_nobody_to_train_with(self, running: list[Process]) -> bool:
        """Returns whether all other processes have succeeded before restarted processes have entered the job.

        The chief needs nobody: it goes on from its backup, or ends with an error, as it alone writes files.
        """
        others = [process for process in self._processes if process not in running]
        return (
            bool(running and others)
            and all(process.is_restart and not process.has_entered for process in running)
            and self._processes[0] not in running
            and all(process.has_entered and process.popen.returncode == 0 for process in others)
        )

    def _is_to_start_again(self, process: Process) -> bool:
        if (
            not process.trains
            or process.popen.returncode == 0
            or process.ended_by_us
            or self._asked_to_end_by is not None
        ):
            return False
        if self._restarted == self._restarts:
            return False
        self._restarted += 1
        _say(f"tfdist run: {_how_it_ended(process)}; it is started again ({self._restarted} of {self._restarts}).")
        return True

    def _end(self, processes: list[Process]) -> None:
        for process in processes:
            process.ended_by_us = True
            process.signal(signal.SIGTERM)
        end = time.monotonic() + TERM_SECONDS
        for process in processes:
            try:
                process.popen.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.signal(signal.SIGKILL)

    def _report(self, blamed: list[Process]) -> int:
        """Reports which process failed; returns the exit code of the job.

        If the processes were asked to end, a process that was slow to end has not failed. Neither has a process that
        names others as the cause, because these were asked to end, too.
        """
        number, process, last = self._asked_to_end_by, blamed[0], blamed[-1]
        has_failed = not (process.ended_by_us or process.is_victim)
        if number is not None and not (has_failed and process.popen.returncode not in (-number, 128 + number)):
            how = " (Ctrl-C)" if number == signal.SIGINT else ""
            _say(f"tfdist run: ended by {_signal_name(number)}{how}, as were the processes.")
            return 128 + number
        for child in reversed(blamed):
            self._show_kept(child.name)
        code = process.popen.returncode
        if process.ended_by_us:
            code = 1 if last.ended_by_us else last.popen.returncode
        others = "left to themselves" if self._keep_going or not process.trains else "ended"
        rest = "" if len(self._processes) == 1 else f"; the other processes were {others}"
        _say(f"tfdist run: {_how_it_ended(process)}{rest}.")
        return 128 - code if code < 0 else code

    def _show_kept(self, name: str) -> None:
        kept = self._outputs.kept.get(name)
        if kept is None:
            return
        if earlier := kept.count - len(kept.lines):
            where = (
                f"all of them are in {self._outputs.log_path(name)}"
                if self._log_folder
                else "--logs FOLDER keeps all of them, --output all shows them"
            )
            _say(f"tfdist run: the last {len(kept.lines)} lines of {name}, without {earlier} earlier ones; {where}:")
        for line in kept.lines:
            sys.stderr.buffer.write(b"[%b] %b" % (name.encode(), line))
        sys.stderr.buffer.flush()

    def _pass_on(self, number: int, frame: Any) -> None:
        if number in _ENDING:
            self._asked_to_end_by = number
        for process in self._processes:
            process.signal(number)

    def _stop(self, number: int, frame: Any) -> None:
        """Handles Ctrl-Z. The processes have no terminal, and the kernel stops such processes only by SIGSTOP."""
        self._pass_on(signal.SIGSTOP, frame)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # stops here, until SIGCONT
        signal.signal(number, self._stop)
        self._pass_on(signal.SIGCONT, frame)


@contextlib.contextmanager
def _woken_by_signals() -> Iterator[socket.socket]:
    """Yields a socket that becomes readable when a signal arrives.

    Python's handlers run on the main thread between two bytecodes. Without the socket, a signal that arrives just
    before the main thread waits, or on another thread, would not end the wait.
    """
    reading, writing = socket.socketpair()
    with reading, writing:
        writing.setblocking(False)
        previous = signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        try:
            yield reading
        finally:
            signal.set_wakeup_fd(previous)


def _how_it_ended(process: Process) -> str:
    code = process.popen.returncode
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with code {code}"
    if process.ended_by_us:
        how = "hung, or failed and did not end by itself"
        if process.is_restart and not process.has_entered:
            how = (
                "was started again, and could not enter the job again: only with QuorumStrategy and on parameter "
                "servers do processes come and go"
            )
    return f"{process.name} (process {process.popen.pid}) {how}"


def _signal_name(number: int) -> str:
    """Returns the name of a signal; most real-time signals have none."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tf_config(task: Task, tasks: list[Task]) -> str:
    cluster: dict[str, list[str]] = {}
    for other in tasks:
        cluster.setdefault(other.job, []).append(other.address)
    return json.dumps({"cluster": cluster, "task": {"type": task.job, "index": task.index}})


def _free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that are free now.

    They are below the range from which the kernel gives ports to connections, because such a port could be taken before
    a task listens at it.
    """
    with contextlib.ExitStack() as listeners:
        sockets: list[socket.socket] = []
        for port in _candidates():
            with contextlib.suppress(OSError):
                sockets.append(listeners.enter_context(socket.create_server(("127.0.0.1", port))))
            if len(sockets) == count:
                break
        return [listener.getsockname()[1] for listener in sockets]


def _candidates() -> Iterator[int]:
    """Yields random ports to try, then always port 0, with which the kernel chooses a port.

    If the kernel's range leaves few other ports, all are 0.
    """
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux: the IANA's first ephemeral port, which macOS uses
        first = 49152
    if first - _FIRST_PORT >= 4096:
        yield from random.sample(range(_FIRST_PORT, first), 2048)
    yield from itertools.repeat(0)
