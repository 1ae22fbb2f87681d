"""Distributes a machine's cores, threads and GPUs over the processes of `tfdist run`."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def cores_of(rank: int, size: int) -> list[int] | None:
    """Returns a rank's share of the cores; None if there are fewer cores than processes."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // size
    return cores[rank * share : (rank + 1) * share] if share else None


def thread_pools(size: int, cores: list[int] | None) -> dict[str, str]:
    """Returns the environment variables for the number of TensorFlow's threads.

    TensorFlow sizes its thread pools by the cores that a process may use, which is right if the process has its own
    cores. If processes share cores, each gets an equal share of threads, instead of as many threads as there are cores.

    Args:
        size: number of processes that share the machine.
        cores: the process's own cores; None if it shares cores.
    """
    count = len(cores) if cores else max(1, (os.cpu_count() or 1) // size)
    names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
    return {name: str(count) for name in names if name not in os.environ}


def gpu_of(rank: int) -> dict[str, str]:
    """Returns the environment variable that selects a rank's GPU; an empty dict without GPUs."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [name for name in given.split(",") if name] if given is not None else _nvidia_gpus()
    return {"CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} if gpus else {}


def _nvidia_gpus() -> list[str]:
    if not shutil.which("nvidia-smi"):
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)  # skips the lines of MIG devices


def at_start(cores: list[int] | None) -> Callable[[], None]:
    """Returns the function that a child runs before the script: it takes its cores, and will die with the launcher."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare
