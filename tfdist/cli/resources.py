"""What `tfdist run` deals out to the processes of a machine."""

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
    """This rank's share of the cores, or None where there are fewer cores than processes."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // size
    return cores[rank * share : (rank + 1) * share] if share else None


def thread_pools(size: int, cores: list[int] | None) -> dict[str, str]:
    """How many threads TensorFlow should start, as environment variables.

    TensorFlow sizes its pools by the cores that a process may use, which is right when it has cores of its own.
    Where it shares them, an equal share of threads avoids that every process starts as many as there are cores.

    Args:
        size: how many processes share the machine.
        cores: of this process, if it has its own.
    """
    count = len(cores) if cores else max(1, (os.cpu_count() or 1) // size)
    settings = {
        "TF_NUM_INTRAOP_THREADS": str(count),
        "TF_NUM_INTEROP_THREADS": str(max(2, count)),  # one may wait in a collective while another computes
        "OMP_NUM_THREADS": str(count),
    }
    return {name: value for name, value in settings.items() if name not in os.environ}


def gpu_of(rank: int) -> dict[str, str]:
    """The GPU that a rank should see, as an environment variable; nothing where there is none."""
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
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)  # between them stand the lines of MIG devices


def at_start(cores: list[int] | None) -> Callable[[], None]:
    """What a process does before it becomes the script: takes its cores, and dies with the launcher."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def prepare() -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare
