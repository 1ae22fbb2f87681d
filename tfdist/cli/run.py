"""`tfdist run`: starts a script as several processes of this machine and looks after them."""

from __future__ import annotations

import argparse
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, TextIO

from tfdist.cli import resources
from tfdist.cluster import launcher
from tfdist.comm import segments
from tfdist.engine import timeline

GRACE_SECONDS = 5.0
"""For the other processes to notice, and say in their own words, that one of them is gone."""

TERM_SECONDS = 3.0
"""Between asking a process to end and ending it."""

KEPT_LINES = 400
"""Of a silent process's output, shown if it fails."""

_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser of `tfdist`."""
    parser = commands.add_parser(
        "run",
        help="start a script as several processes of this machine",
        description="Starts a script as N processes of this machine, each with its TF_CONFIG, its cores and its GPU. "
        "When one of them fails, the others are ended, and its exit code is passed on.",
    )
    parser.add_argument("-n", "--processes", type=positive, required=True, help="how many processes")
    parser.add_argument(
        "--output",
        choices=("chief", "all"),
        default="chief",
        help="whose output is shown: rank 0's, and another's only if it fails (default); or all, with the rank before "
        "each line",
    )
    parser.add_argument(
        "--cores",
        choices=("share", "all"),
        default="share",
        help="each process gets an equal share of the cores (default), or may use all of them",
    )
    parser.add_argument(
        "--timeline",
        metavar="FILE",
        help="record when every rank's collectives are ready, posted, under way, done and waited for; "
        "FILE opens in https://ui.perfetto.dev",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="Python script to start")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    parser.set_defaults(execute=execute)


def positive(text: str) -> int:
    """An argument that must be a whole number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def execute(options: argparse.Namespace) -> int:
    """Runs the script; returns the exit code of the process that failed first, or 0."""
    if not options.module and not os.path.exists(options.script):
        print(f"tfdist run: there is no file {options.script}", file=sys.stderr)
        return 2
    script = ["-m", options.script] if options.module else [options.script]
    command = [sys.executable, "-u", *script, *options.arguments]
    path = options.timeline and os.path.abspath(options.timeline)
    if path and not os.access(os.path.dirname(path), os.W_OK):
        print(f"tfdist run: {path} cannot be written: there is no such folder, or no right to", file=sys.stderr)
        return 2
    if path:
        os.environ[timeline.VARIABLE] = path
    code = Job(command, options.processes, options.cores == "share", options.output == "all").run()
    if path:
        _tell_of_timeline(path, options.processes)
    return code


def _tell_of_timeline(path: str, ranks: int) -> None:
    try:
        missing = timeline.merge(path, ranks)
    except OSError as error:
        print(f"tfdist run: cannot write the timeline: {error}", file=sys.stderr)
        return
    without = f", without rank {', '.join(map(str, missing))}, which wrote nothing" if missing else ""
    print(f"tfdist run: timeline in {path}{without}; open it in https://ui.perfetto.dev", file=sys.stderr)


@dataclass
class Process:
    """One rank.

    Attributes:
        rank: its rank.
        popen: the process, the leader of a group of its own.
        report: where it says whether it failed because another did.
        kept: the end of its output, where that is not shown at once.
    """

    rank: int
    popen: subprocess.Popen[str]
    report: int
    kept: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    reader: threading.Thread | None = None

    def is_victim(self) -> bool:
        """Whether the process, which has ended, said that another one's failure was the cause."""
        try:
            return bool(os.read(self.report, 64))
        except BlockingIOError:  # a child of it still holds the other end
            return False

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
    """

    def __init__(self, command: list[str], size: int, share_cores: bool, show_all: bool) -> None:
        self._command = command
        self._size = size
        self._share_cores = share_cores
        self._show_all = show_all
        self._processes: list[Process] = []
        self._ended: queue.Queue[tuple[int, int]] = queue.Queue()
        self._printing = threading.Lock()
        self._ended_by_us: set[int] = set()

    def run(self) -> int:
        """Starts the processes and waits for them."""
        begun = time.time()
        for number in _PASSED_ON:
            signal.signal(number, self._pass_on)
        ports, secret = _free_ports(self._size), secrets.token_hex(16)
        try:
            for rank in range(self._size):
                self._processes.append(self._start(rank, ports, secret))
            return self._wait()
        finally:
            for process in self._processes:
                process.signal(signal.SIGKILL)  # whatever a script left behind in its group
                process.popen.wait()
            segments.sweep(begun)

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
        own_output = rank == 0 and not self._show_all
        report, tell = os.pipe()
        os.set_blocking(report, False)
        environment[launcher.REPORT] = str(tell)
        popen = subprocess.Popen(
            self._command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if own_output else subprocess.PIPE,
            stderr=None if own_output else subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[tell],
            start_new_session=True,
            preexec_fn=resources.at_start(cores),
        )
        os.close(tell)
        process = Process(rank, popen, report)
        if popen.stdout:
            process.reader = threading.Thread(target=self._read, args=(process, popen.stdout), daemon=True)
            process.reader.start()
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()
        return process

    def _watch(self, process: Process) -> None:
        self._ended.put((process.rank, process.popen.wait()))

    def _read(self, process: Process, stream: TextIO) -> None:
        for line in stream:
            if self._show_all:
                self._print(f"[rank {process.rank}] {line}")
            else:
                process.kept.append(line)

    def _print(self, text: str) -> None:
        with self._printing:
            sys.stderr.write(text)
            sys.stderr.flush()

    def _wait(self) -> int:
        first: tuple[int, int] | None = None
        first_is_victim = False
        running = set(range(self._size))
        deadline = None
        while running:
            try:
                timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
                rank, code = self._ended.get(timeout=timeout)
            except queue.Empty:
                self._end(running)
                deadline = None
                continue
            running.discard(rank)
            if code == 0:
                continue
            victim = rank in self._ended_by_us or self._processes[rank].is_victim()
            if first is None:
                deadline = time.monotonic() + GRACE_SECONDS
            if first is None or (first_is_victim and not victim):
                first, first_is_victim = (rank, code), victim
        if first is None:
            return 0
        return self._report(*first)

    def _end(self, running: set[int]) -> None:
        for rank in running:
            self._ended_by_us.add(rank)
            self._processes[rank].signal(signal.SIGTERM)
        end = time.monotonic() + TERM_SECONDS
        for rank in running:
            try:
                self._processes[rank].popen.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._processes[rank].signal(signal.SIGKILL)

    def _report(self, rank: int, code: int) -> int:
        process = self._processes[rank]
        if process.reader:
            process.reader.join(TERM_SECONDS)
        self._print("".join(f"[rank {rank}] {line}" for line in process.kept))
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        rest = "" if self._size == 1 else "; the other processes were ended"
        self._print(f"tfdist run: rank {rank} (process {process.popen.pid}) {how}{rest}.\n")
        return 128 - code if code < 0 else code

    def _pass_on(self, number: int, frame: Any) -> None:
        for process in self._processes:
            process.signal(number)


def _free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody uses now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports
