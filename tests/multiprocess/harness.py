"""Starting a script as real processes, waiting for them as long as they get on, and keeping what each of them said."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.multiprocess import forking
from tests.multiprocess.progress import STILL_SECONDS, Progress

PROGRAMS = Path(__file__).parent / "programs"
ON_THE_PATH = [Path(__file__).parents[1] / "strict", PROGRAMS / "shared"]
"""Folders on the path of all processes: one makes them refuse deprecated functions, the other holds shared code."""
DEADLINE = 600.0
"""Seconds, of everything that is waited for. It ends what gets on for ever; what hangs is noticed by `Progress`."""
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
    """How one process ended: its exit code (minus the signal's number if it was killed), and its output."""

    code: int
    output: str


class Processes:
    """Processes under way, one a rank."""

    def __init__(self, popens: list[subprocess.Popen[bytes] | forking.Forked], outputs: list[Path]) -> None:
        self.popens = popens
        self._outputs = outputs
        self._kept: list[str] = []
        self._first_to_fail: list[int] = []

    def output(self, rank: int) -> str:
        return self._kept[rank] if self._kept else self._outputs[rank].read_text(errors="replace")

    def keep(self) -> None:
        """Reads the outputs, whose files are about to go."""
        self._kept = [self.output(rank) for rank in range(len(self.popens))]

    def outputs(self) -> str:
        """What all ranks have written, those first that failed first, and of no other rank's failure."""
        ranks = [*self._first_to_fail, *(rank for rank in range(len(self.popens)) if rank not in self._first_to_fail)]
        texts = {rank: self.output(rank) for rank in ranks}
        ranks.sort(key=lambda rank: "PeerLostError" in texts[rank])
        return "\n".join(f"--- rank {rank} ---\n{texts[rank]}" for rank in ranks)

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Sends a signal. Who is killed has ended afterwards: nobody starts a process again that has not."""
        os.kill(self.popens[rank].pid, number)
        if number == signal.SIGKILL:
            self.popens[rank].wait(DEADLINE)

    def await_output(self, rank: int, text: str) -> None:
        """Waits until a rank has written a text."""
        for _ in self._getting_on(lambda: f"rank {rank} did not print {text!r}"):
            has_ended = self.popens[rank].poll() is not None
            if text in self.output(rank):
                return
            assert not has_ended, f"rank {rank} ended before {text!r}\n{self.outputs()}"

    def wait(self, still: float = STILL_SECONDS) -> list[Ended]:
        """Waits until all ranks have ended.

        Args:
            still: seconds for which they may neither write nor compute.
        """
        ended: dict[int, Ended] = {}
        for _ in self._getting_on(lambda: f"ranks {set(range(len(self.popens))) - set(ended)} hang", still):
            for rank, popen in enumerate(self.popens):
                if rank not in ended and popen.poll() is not None:
                    ended[rank] = Ended(popen.returncode, self.output(rank))
                    if popen.returncode:
                        self._first_to_fail.append(rank)
            if len(ended) == len(self.popens):
                break
        return [ended[rank] for rank in range(len(self.popens))]

    def _getting_on(self, what: Callable[[], str], still: float = STILL_SECONDS) -> Iterator[None]:
        """Yields now and again as long as processes get on; then fails, and says ``what``."""
        begin = time.monotonic()
        progress = Progress([popen.pid for popen in self.popens], self._written, still)
        while True:
            yield
            waited = time.monotonic() - begin
            assert waited < DEADLINE, f"{what()}: they have not ended in {DEADLINE:g} s\n{self.outputs()}"
            assert not progress.stands_still(), f"{what()}: they stand still\n{self.outputs()}"
            time.sleep(min(0.1, 0.01 + waited / 50))  # each look costs a millisecond, of which others wait for a core

    def _written(self) -> int:
        return sum(path.stat().st_size for path in self._outputs)


_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKER += int(os.environ.get("TEST_WORKERS_BEFORE", "0"))  # of other sessions of pytest
_PORTS_OF_A_WORKER = 2_000
_ports = itertools.cycle(range(10_000 + _WORKER * _PORTS_OF_A_WORKER, 10_000 + (_WORKER + 1) * _PORTS_OF_A_WORKER))
"""Each pytest-xdist worker has its own, below those that the kernel chooses for connections."""
_giving_ports = threading.Lock()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, and that no other launch is given soon, as launches may overlap."""
    with _giving_ports:
        return list(itertools.islice((port for port in _ports if _is_free(port)), count))


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


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
    names = ("TF_CONFIG", "TFDIST_", "SLURM_", "PMI_", "PYTHONDONTWRITEBYTECODE")  # to compile tfdist once
    base = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    base.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="-1", PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
    base.update(TF_NUM_INTRAOP_THREADS="1", TF_NUM_INTEROP_THREADS="1")
    base["PYTHONPATH"] = os.pathsep.join(filter(None, [*map(str, ON_THE_PATH), base.get("PYTHONPATH")]))
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
                rank_settings = {**(settings or {}), **(per_rank[rank] if per_rank else {})}
                if clustered and size > 1:
                    rank_settings.setdefault("TF_CONFIG", tf_config(rank, ports))
                env = environment(**rank_settings)
                with outputs[rank].open("wb") as output:
                    if not prefixes and forking.applies(command, rank_settings):
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


def run(command: Sequence[str], size: int, settings: Mapping[str, str] | None = None) -> list[Ended]:
    """Starts a script on ``size`` processes and waits for all; every one must succeed."""
    with started(command, size, settings) as processes:
        ended = processes.wait()
        assert [end.code for end in ended] == [0] * size, processes.outputs()
        return ended


def assert_all_fail(command: Sequence[str], message: str, size: int = 2, **settings: str) -> None:
    """Every rank of a script has to fail with an error that a pattern finds."""
    with started(command, size, settings) as processes:
        for end in processes.wait():
            assert end.code, end.output
            assert re.search(message, end.output), end.output


def assert_killed_rank_is_named(
    command: Sequence[str],
    size: int = 3,
    rank: int = 1,
    error: str = "PeerLostError: .*",
    ready: str = "READY",
    **settings: str,
) -> None:
    """Kills a rank that has printed that it is ready; every other one has to fail with an error that names it.

    ``error`` is a pattern of what stands before the name.
    """
    with started(command, size, settings) as processes:
        processes.await_output(rank, ready)
        processes.signal(rank, signal.SIGKILL)
        processes.wait()
        for other in set(range(size)) - {rank}:
            assert processes.popens[other].returncode not in (0, None), processes.outputs()
            named = rf"{error}rank {rank}, worker {rank} .*died"
            assert re.search(named, processes.output(other)), processes.outputs()


def tfdist(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs the `tfdist` command to its end, as long as its processes get on."""
    return completed([sys.executable, "-m", "tfdist.cli", *arguments], environment(**settings))


def mpiexec(size: int, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """Runs Python on several ranks under MPICH's launcher to its end, as long as its processes get on."""
    return completed([str(MPIEXEC), "-n", str(size), sys.executable, *arguments], environment(**settings))


def completed(
    command: Sequence[str], env: Mapping[str, str], cwd: str | Path | None = None, still: float = STILL_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end, as long as it and its children get on."""
    counts.launches += 1
    counts.processes += 1
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        with outputs[0].open("wb") as stdout, outputs[1].open("wb") as stderr:
            popen = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        processes = Processes([popen], outputs[:1])
        try:
            (end,) = processes.wait(still)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{outputs[1].read_text(errors='replace')}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
        texts = [path.read_text(errors="replace") for path in outputs]
    return subprocess.CompletedProcess(command, end.code, *texts)


def results(ended: Sequence[Ended]) -> list[dict]:
    """What each rank printed after ``RESULT``, as JSON."""
    parsed = []
    for end in ended:
        lines = [line for line in end.output.splitlines() if line.startswith("RESULT ")]
        assert lines, end.output
        parsed.append(json.loads(lines[-1][len("RESULT ") :]))
    return parsed


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
    """MPI's and tfdist's files in shared memory that no process uses, and this session's server processes.

    Other jobs may be under way on the machine, whose processes have their files mapped or open.
    """
    prefixes = ("mpich_", "ucx_shm_", "tfdist_")
    segments = {name for name in os.listdir("/dev/shm") if name.startswith(prefixes)}
    servers = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if segments:
                    segments -= _used_by(path, segments)
                command = (path / "cmdline").read_bytes().decode(errors="replace")
                if "tfdist.cluster.server" in command and SESSION in (path / "environ").read_text():
                    servers.append(command.replace("\0", " "))
    return sorted(segments) + servers


def _used_by(process: Path, segments: set[str]) -> set[str]:
    """Those of some files in /dev/shm that a process has mapped or open."""
    used = {line.rpartition("/dev/shm/")[2] for line in (process / "maps").read_text().splitlines()}
    used |= {os.readlink(link).rpartition("/")[2] for link in (process / "fd").iterdir()}
    return segments & used


def assert_nothing_left() -> None:
    end = time.monotonic() + DEADLINE / 10
    while left := left_behind():
        assert time.monotonic() < end, left
        time.sleep(0.05)
