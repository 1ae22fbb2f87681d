"""Initializes and finalizes an MPI library, with or without a launcher."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tfdist.errors import MPIUnavailableError

_AS_IT_IS_LOADED = {"UCX_DEBUG_SIGNO": "0"}
"""UCX, which MPICH communicates by, handles SIGHUP otherwise, so that closing a terminal ends nothing."""


def load() -> Any:
    """Imports `mpi4py.MPI` without initializing MPI.

    Raises:
        MPIUnavailableError: mpi4py is not installed or finds no MPI library.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        with _environment(_AS_IT_IS_LOADED):
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIUnavailableError(
            f"no MPI library could be loaded ({_first_line(error)}). Run `pip install mpich`; or, to use the "
            "cluster's own, load its module first or set MPI4PY_MPIABI / LD_LIBRARY_PATH. "
            "`tfdist doctor` shows which library is found."
        ) from None
    return MPI


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def library(mpi: Any) -> tuple[str, str]:
    """Returns the name and version of the loaded MPI library, and the file it was loaded from."""
    first_line = mpi.Get_library_version().rstrip("\x00").strip().partition("\n")[0]
    return " ".join(first_line.replace("Version:", "").split()), _library_path()


def _library_path() -> str:
    """Returns the path of the loaded libmpi; that of the extension module if it is unknown (no /proc)."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps}
    except OSError:
        paths = set()
    for path in sorted(paths):
        name = os.path.basename(path)
        if _is_library(name):
            return path
    return sys.modules["mpi4py.MPI"].__file__ or "unknown"


def initialize_from_launcher(mpi: Any) -> None:
    """Initializes MPI under mpiexec or srun."""
    if not mpi.Is_initialized():
        _initialize(mpi)


def initialize_from_socket(mpi: Any, fd: int, rank: int, size: int, settings: Mapping[str, str]) -> None:
    """Initializes MPICH with a process manager behind a socket, without a launcher.

    Args:
        mpi: `mpi4py.MPI`, not initialized.
        fd: the file descriptor of the socket to the process manager.
        rank: this process's rank.
        size: the number of processes.
        settings: environment variables for MPI; values set by the user take precedence.

    Raises:
        MPIUnavailableError: the library is not MPICH, or fails to initialize.
    """
    version, path = library(mpi)
    if not version.startswith("MPICH"):
        raise MPIUnavailableError(
            f"without an MPI launcher, tfdist can initialize only MPICH (or a library with its PMI-1 interface); the "
            f"loaded library is {version} from {path}. Start the script with that library's mpiexec or with srun, or "
            "run `pip install mpich`."
        )
    for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE"):  # of an mpiexec that the job was started within
        os.environ.pop(name, None)
    with _environment({**settings, "PMI_FD": str(fd), "PMI_RANK": str(rank), "PMI_SIZE": str(size)}):
        _initialize(mpi)
    mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Context with variables that the user has not set. Child processes that start later do not inherit them."""
    ours = {name: value for name, value in settings.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def network_settings(mpi: Any, one_network: bool) -> dict[str, str]:
    """Returns environment variables for MPICH's communication with processes that it shares no memory with.

    UCX's own shared memory is never used: it would connect processes that were found to share none, it needs space in
    /dev/shm, and it leaves its segments there when a process is killed.

    Args:
        mpi: `mpi4py.MPI`.
        one_network: whether all processes see the same loopback interface, which MPI then uses alone.
    """
    if not one_network:
        return {"UCX_TLS": "^sm"}
    if any(name in os.environ for name in _NETWORK_VARIABLES):
        return {}
    if re.search(
        r"Device:\s*ch4:.*\bofi\b", mpi.Get_library_version()
    ):  # UCX's TCP finds no way over the loopback interface
        return {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
    return {"MPIR_CVAR_CH4_NETMOD": "ucx", "UCX_NET_DEVICES": "lo"}


_NETWORK_VARIABLES = ("MPIR_CVAR_CH4_NETMOD", "FI_PROVIDER", "FI_TCP_IFACE", "UCX_TLS", "UCX_NET_DEVICES")


def _initialize(mpi: Any) -> None:
    """Calls `MPI_Init_thread` without holding the GIL.

    Uses ctypes, because mpi4py would hold the GIL during the call, and block the threads that answer MPI and that
    detect a dead peer or a timeout.
    """
    version, path = library(mpi)
    if not _is_library(path):
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        return
    provided = ctypes.c_int()
    code = ctypes.CDLL(path).MPI_Init_thread(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(provided))
    if code != 0:
        raise MPIUnavailableError(f"MPI_Init_thread of {version} from {path} failed with code {code}")


def _is_library(path: str) -> bool:
    return os.path.basename(path).startswith(("libmpi.so", "libmpi_abi.so", "libmpich.so"))


def finalize(mpi: Any) -> None:
    """Calls `MPI_Finalize`, with the GIL released while it waits for the other processes."""
    path = _library_path()
    if _is_library(path):
        ctypes.CDLL(path).MPI_Finalize()
    else:
        mpi.Finalize()
