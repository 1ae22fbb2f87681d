"""Starting a script as real processes, with a deadline, and keeping what each of them said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.multiprocess import forking

PROGRAMS = Path(__file__).parent / "programs"
DEADLINE = 120.0
SESSION = uuid.uuid4().hex
"""In the environment of all that this test session starts, so that others' processes are not taken for its own."""
MPIEXEC = Path(sys.executable).parent / "mpiexec"
"""MPICH's, from PyPI."""


@dataclass
class Counts:
    """Launches, and processes in them, since the session began."""

    launches: int = 0
    processes: int = 0


counts = Counts()


@dataclass
class Ended:
    """How one process ended: its exit code (minus the signal's number if it was killed), its output, and when."""

    code: int
    output: str
    seconds: float


class Processes:
    """Processes under way, one a rank."""

    def __init__(self, popens: list[subprocess.Popen[bytes] | forking.Forked], outputs: list[Path]) -> None:
        self.popens = popens
        self._outputs = outputs
        self._kept: list[str] = []
        self._begun = time.monotonic()

    def output(self, rank: int) -> str:
        return self._kept[rank] if self._kept else self._outputs[rank].read_text(errors="replace")

    def keep(self) -> None:
        """Reads the outputs, whose files are about to go."""
        self._kept = [self.output(rank) for rank in range(len(self.popens))]

    def outputs(self) -> str:
        return "\n".join(f"--- rank {rank} ---\n{self.output(rank)}" for rank in range(len(self.popens)))

    def signal(self, rank: int, number: signal.Signals) -> float:
        os.kill(self.popens[rank].pid, number)
        return time.monotonic()

    def await_output(self, rank: int, text: str, deadline: float = DEADLINE) -> None:
        end = time.monotonic() + deadline
        while text not in self.output(rank):
            assert time.monotonic() < end, f"rank {rank} did not print {text!r}\n{self.outputs()}"
            assert self.popens[rank].poll() is None, f"rank {rank} ended before {text!r}\n{self.outputs()}"
            time.sleep(0.02)

    def wait(self, deadline: float = DEADLINE) -> list[Ended]:
        end = time.monotonic() + deadline
        ended: dict[int, Ended] = {}
        while len(ended) < len(self.popens):
            for rank, popen in enumerate(self.popens):
                if rank not in ended and popen.poll() is not None:
                    ended[rank] = Ended(popen.returncode, "", time.monotonic() - self._begun)
            assert time.monotonic() < end, f"ranks {set(range(len(self.popens))) - set(ended)} hang\n{self.outputs()}"
            time.sleep(0.02)
        for rank, end_of_rank in ended.items():
            end_of_rank.output = self.output(rank)
        return [ended[rank] for rank in range(len(self.popens))]


_given_ports: set[int] = set()
_giving_ports = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, and that no other launch has been given, as launches may overlap."""
    with _giving_ports, contextlib.ExitStack() as listeners:
        ports: list[int] = []
        while len(ports) < count:
            listener = listeners.enter_context(socket.create_server(("127.0.0.1", 0)))
            port = listener.getsockname()[1]
            if port not in _given_ports:
                ports.append(port)
        _given_ports.update(ports)
        return ports


def tf_config(rank: int, ports: Sequence[int]) -> str:
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})


def tf_configs(*tasks: tuple[str, int]) -> list[dict[str, str]]:
    """The environment of each task of a cluster on this machine; tasks are a job and an index."""
    ports = iter(free_ports(len(tasks)))
    cluster: dict[str, list[str]] = {}
    for job, _ in tasks:
        cluster.setdefault(job, []).append(f"127.0.0.1:{next(ports)}")
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})} for job, index in tasks
    ]


def environment(**settings: str) -> dict[str, str]:
    names = ("TF_CONFIG", "TFDIST_", "SLURM_", "PMI_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    base.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
    base.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="2")
    base.update(TEST_SESSION=SESSION, **settings)
    return base


@contextlib.contextmanager
def started(
    command: Sequence[str],
    size: int,
    settings: Mapping[str, str] | None = None,
    per_rank: Sequence[Mapping[str, str]] | None = None,
    clustered: bool = True,
    prefixes: Sequence[Sequence[str]] | None = None,
) -> Iterator[Processes]:
    """Starts ``python command…`` once per rank, with TF_CONFIG; ends whatever is left at the end.

    ``prefixes`` are commands that run each rank's own. Without them, scripts with TensorFlow are forks (`forking`).
    """
    ports = free_ports(size)
    counts.launches += 1
    counts.processes += size
    popens: list[subprocess.Popen[bytes] | forking.Forked] = []
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank{rank}" for rank in range(size)]
        try:
            for rank in range(size):
                own = {**(settings or {}), **(per_rank[rank] if per_rank else {})}
                if clustered and size > 1:
                    own.setdefault("TF_CONFIG", tf_config(rank, ports))
                env = environment(**own)
                with outputs[rank].open("wb") as output:
                    if not prefixes and forking.applies(command, own):
                        popens.append(forking.start(rank, command, env, outputs[rank]))
                        continue
                    popens.append(
                        subprocess.Popen(
                            [*(prefixes[rank] if prefixes else ()), sys.executable, *command],
                            env=env,
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
            processes = Processes(popens, outputs)
            yield processes
        finally:
            for popen in popens:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(popen.pid, signal.SIGKILL)
                popen.wait()
            if len(popens) == size:
                processes.keep()


def run(
    command: Sequence[str], size: int, deadline: float = DEADLINE, settings: Mapping[str, str] | None = None
) -> list[Ended]:
    """Starts a script on ``size`` processes and waits for all; every one must succeed."""
    with started(command, size, settings) as processes:
        ended = processes.wait(deadline)
        assert [end.code for end in ended] == [0] * size, processes.outputs()
        return ended


def tfdist(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs the `tfdist` command to its end."""
    counts.launches += 1
    counts.processes += 1
    return subprocess.run(
        [sys.executable, "-m", "tfdist.cli", *arguments],
        env=environment(**settings),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


def results(ended: Sequence[Ended]) -> list[dict]:
    """What each rank printed after ``RESULT``, as JSON."""
    found = []
    for end in ended:
        lines = [line for line in end.output.splitlines() if line.startswith("RESULT ")]
        assert lines, end.output
        found.append(json.loads(lines[-1][len("RESULT ") :]))
    return found


def leaves(value: Any, path: tuple = ()) -> Iterator[tuple[tuple, Any]]:
    """The parts of a result, lists of numbers whole, each with its path; nothing for None."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, (*path, key))
    elif isinstance(value, list) and not all(isinstance(part, (int, float)) for part in value):
        for index, part in enumerate(value):
            yield from leaves(part, (*path, index))
    elif value is not None:
        yield path, value


def left_behind() -> list[str]:
    """MPI's and tfdist's files in shared memory, and this session's server processes, that still exist."""
    prefixes = ("mpich_", "ucx_shm_", "tfdist_")
    segments = [name for name in os.listdir("/dev/shm") if name.startswith(prefixes)]
    servers = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                command = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace")
                if "tfdist.cluster.server" in command and SESSION in Path("/proc", name, "environ").read_text():
                    servers.append(command.replace("\0", " "))
    return segments + servers


def assert_nothing_left(deadline: float = 15.0) -> None:
    end = time.monotonic() + deadline
    while left := left_behind():
        assert time.monotonic() < end, left
        time.sleep(0.05)
