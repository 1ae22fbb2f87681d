"""`tfdist doctor`: checks this machine and the cluster before a long job, and gives advice on problems."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

from tfdist._version import __version__
from tfdist.cli import gpu_checks
from tfdist.cli.findings import Finding, Severity
from tfdist.cli.numbers import seconds
from tfdist.cluster import discovery, launcher
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.cluster.spec import Cluster, Task, split_address
from tfdist.comm import mpi_library
from tfdist.engine import machine_code
from tfdist.errors import TfdistError
from tfdist.runtime import world
from tfdist.strategies import HOW_TO_INSTALL

_CONNECT_SECONDS = 3.0
_SHARED_MEMORY = 1126 << 10
"""Bytes that MPI takes in /dev/shm for one process."""
_TENSORFLOW_BUILDS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tf-nightly")
_OLDEST_TENSORFLOW, _NEWEST_TENSORFLOW = (2, 18), (2, 21)


def add_parser(commands: Any) -> None:
    """Adds the subcommand to the parser of `tfdist`."""
    parser = commands.add_parser(
        "doctor",
        help="check this machine and the cluster before a long job",
        description="Checks versions, MPI, devices, TF_CONFIG and the tasks' addresses. Started on all tasks at once "
        "(with TF_CONFIG on each machine, under mpiexec, or as `tfdist run -n 2 -m tfdist.cli doctor`), it also "
        "measures an all-reduce between them.",
    )
    parser.add_argument(
        "--timeout", type=seconds, default=30.0, help="seconds to wait for the other tasks (default: %(default)g)"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="also copy, sum and train on each GPU, and compare with the CPU"
    )
    parser.set_defaults(execute=execute)


def execute(options: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if one of them is a problem."""
    problems = 0
    for finding in examine(options.timeout, options.gpu):
        problems += finding.level is Severity.PROBLEM
        print(f"{finding.level.value:>7}  {finding.subject:<12} {finding.text}", flush=True)
        if finding.advice:
            print(f"{'':>7}  {'':<12} → {finding.advice}", flush=True)
    print("Everything is fine." if not problems else f"{problems} problem(s).", flush=True)
    return int(problems > 0)


def examine(timeout: float, tries_gpus: bool = False) -> Iterator[Finding]:
    """Checks one subject after the other.

    Args:
        timeout: seconds to wait for the other tasks.
        tries_gpus: whether to check computations on each GPU.

    Yields:
        The findings.
    """
    yield from _versions()
    yield from _mpi()
    yield from _machine_code()
    yield from _devices()
    if tries_gpus:
        yield from gpu_checks.try_all()
    try:
        cluster = discovery.discover(None)
        yield from _cluster(cluster)
    except TfdistError as error:
        yield Finding(Severity.PROBLEM, "cluster", str(error))
        return
    if cluster is not None and cluster.size > 1 and cluster.rank is not None:
        for task in cluster.tasks[: cluster.size]:
            yield _own_address(task) if task == cluster.task else _peer_address(task, task == cluster.tasks[0])
    if launcher.size() > 1 or (cluster is not None and cluster.size > 1 and cluster.rank is not None):
        yield from _measure(cluster, timeout)


def _versions() -> Iterator[Finding]:
    yield Finding(Severity.OK, "tfdist", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    for name in ("keras", "numpy", "mpi4py"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield Finding(Severity.OK, name, importlib.metadata.version(name))
    for build in _TENSORFLOW_BUILDS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(build)
            major, minor = (int(part) for part in version.split(".")[:2])
            if _OLDEST_TENSORFLOW <= (major, minor) <= _NEWEST_TENSORFLOW:
                yield Finding(Severity.OK, "TensorFlow", f"{version} ({build})")
            else:
                span = " to ".join(f"{a}.{b}" for a, b in (_OLDEST_TENSORFLOW, _NEWEST_TENSORFLOW))
                yield Finding(
                    Severity.NOTE,
                    "TensorFlow",
                    f"{version} ({build})",
                    f"tfdist is tested with {span}; others may fail",
                )
            return
    yield Finding(Severity.PROBLEM, "TensorFlow", "not installed", HOW_TO_INSTALL)


def _mpi() -> Iterator[Finding]:
    try:
        module = mpi_library.load()
    except TfdistError as error:
        yield Finding(Severity.PROBLEM, "MPI", str(error))
        return
    version, path = mpi_library.library(module)
    if version.startswith("MPICH"):
        yield Finding(Severity.OK, "MPI", f"{version}, from {path}")
    else:
        yield Finding(
            Severity.NOTE,
            "MPI",
            f"{version}, from {path}",
            "start jobs with this library's mpiexec, or with srun; TF_CONFIG alone needs MPICH (`pip install mpich`)",
        )


def _machine_code() -> Iterator[Finding]:
    if os.environ.get(machine_code.VARIABLE) == "0":
        yield Finding(Severity.NOTE, "machine code", f"not used, as {machine_code.VARIABLE} is 0: sums are in Python")
    elif (path := machine_code.path()) is None:
        yield Finding(
            Severity.NOTE,
            "machine code",
            "not built: processes of one machine sum gradients in Python, which takes longer",
            "install a C compiler, such as gcc, and then tfdist again",
        )
    else:
        try:
            machine_code.load()
        except RuntimeError as error:
            yield Finding(Severity.PROBLEM, "machine code", str(error))
        else:
            yield Finding(Severity.OK, "machine code", f"sums in shared memory, by {path}")


def _devices() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(Severity.OK, "CPU", f"{cores} core(s) for this process, {os.cpu_count()} in the machine")
    yield from gpu_checks.listed()
    if os.path.isdir("/dev/shm"):
        free = shutil.disk_usage("/dev/shm").free
        if free < _SHARED_MEMORY:
            yield Finding(
                Severity.PROBLEM,
                "/dev/shm",
                f"{free >> 10} KiB free",
                "MPI takes 1.1 MiB of it for each process: give a container more (`--shm-size=64m`, or an emptyDir of "
                "medium Memory)",
            )


def _cluster(cluster: Cluster | None) -> Iterator[Finding]:
    if launcher.size() > 1:
        yield Finding(Severity.OK, "cluster", f"started by an MPI launcher on {launcher.size()} processes")
        return
    if cluster is None:
        yield Finding(Severity.OK, "cluster", "no TF_CONFIG and no launcher: a script started like this runs alone")
        return
    if cluster.rank is None:
        yield Finding(Severity.OK, "cluster", f"this is {cluster.task}: it takes no part in collectives")
        return
    yield Finding(Severity.OK, "cluster", f"{cluster.size} task(s); this is {cluster.task}, rank {cluster.rank}")
    if cluster.size > 1 and not read_secret():
        yield Finding(
            Severity.NOTE,
            "secret",
            "none is set: every process that can reach the chief's address can enter the job",
            "set TFDIST_SECRET to the same value on every task",
        )


def _resolve(task: Task) -> Any:
    host, port = split_address(task.address)
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]


def _unresolved(task: Task, error: OSError) -> Finding:
    advice = "check that the name is right and that this machine can resolve it"
    return Finding(Severity.PROBLEM, "address", f"{task}: {error.strerror or error}", advice)


def _peer_address(task: Task, is_chief: bool) -> Finding:
    try:
        resolved = _resolve(task)
    except OSError as error:
        return _unresolved(task, error)
    with socket.socket(resolved[0], socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_SECONDS)
        code = probe.connect_ex(resolved[4])
    if code == errno.ECONNREFUSED:
        return Finding(Severity.OK, "address", f"{task}: reachable, and free")
    if code == 0 and is_chief:
        return Finding(Severity.OK, "address", f"{task}: reachable; a process listens there, the chief if it is up")
    if code == 0:
        return Finding(
            Severity.NOTE, "address", f"{task}: reachable, but in use", "check that no other job uses this address"
        )
    return Finding(
        Severity.PROBLEM,
        "address",
        f"{task}: not reachable ({os.strerror(code)})",
        "check that the machine is up and that no firewall blocks the port; MPI needs other ports open as well",
    )


def _own_address(task: Task) -> Finding:
    try:
        resolved = _resolve(task)
    except OSError as error:
        return _unresolved(task, error)
    with socket.socket(resolved[0], socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(resolved[4])
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                return Finding(
                    Severity.NOTE,
                    "address",
                    f"{task}: no interface of this machine has this task's own address",
                    "this is as it should be behind a service or a NAT; otherwise correct TF_CONFIG",
                )
            return Finding(
                Severity.PROBLEM,
                "address",
                f"{task}: this task's own port cannot be used ({error.strerror})",
                "end the process that uses it (`ss -ltnp` shows it) or choose another port, on every task",
            )
    return Finding(Severity.OK, "address", f"{task}: this task's own, and free")


def _measure(cluster: Cluster | None, timeout: float) -> Iterator[Finding]:
    import numpy as np

    from tfdist.collectives import ring

    print(f"{'':>7}  {'all-reduce':<12} waiting up to {timeout:g} s for the other tasks …", file=sys.stderr, flush=True)
    try:
        entered = world.enter(cluster, Timeouts(start=timeout, heartbeat=timeout, collective=timeout))
    except TfdistError as error:
        yield Finding(
            Severity.PROBLEM,
            "all-reduce",
            str(error),
            "start `tfdist doctor` on all tasks at once to measure between them",
        )
        return
    for name, size, repeats in (("small", 1 << 12, 100), ("large", 1 << 25, 5)):
        buffer = np.zeros(size // 4, np.float32)
        seconds = []
        for _ in range(repeats + 1):
            begun = time.perf_counter()
            entered.group.run(f"doctor {name}", ring.all_reduce(buffer))
            seconds.append(time.perf_counter() - begun)
        median = sorted(seconds[1:])[repeats // 2]
        what = f"{median * 1e6:.0f} µs for 4 KiB" if name == "small" else f"{size / median / 1e9:.2f} GB/s for 32 MiB"
        yield Finding(
            Severity.OK, "all-reduce", f"{what} over {entered.size} processes, {entered.local_size} on this machine"
        )
