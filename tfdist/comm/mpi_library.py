"""Bringing an MPI library up, with or without a launcher, and taking it down."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from tfdist.errors import MPIUnavailableError


def load() -> Any:
    """Imports `mpi4py.MPI` without initializing MPI.

    Raises:
        MPIUnavailableError: mpi4py is not installed or finds no MPI library.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise MPIUnavailableError(
            f"no MPI library could be loaded ({_first_line(error)}). `pip install mpich` brings one; to use the "
            "cluster's own, load its module first or point MPI4PY_MPIABI / LD_LIBRARY_PATH to it. "
            "`tfdist doctor` shows what is found."
        ) from None
    return MPI


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def library(mpi: Any) -> tuple[str, str]:
    """The name and version of the loaded MPI library, and the file it was loaded from."""
    first_line = mpi.Get_library_version().rstrip("\x00").strip().partition("\n")[0]
    return " ".join(first_line.replace("Version:", "").split()), _library_path()


def _library_path() -> str:
    """Where the loaded libmpi lies; the extension module itself when it cannot be told (no /proc)."""
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps}
    except OSError:
        paths = set()
    for path in sorted(paths):
        name = os.path.basename(path)
        if name.startswith(("libmpi.so", "libmpi_abi.so", "libmpich.so")):
            return path
    return sys.modules["mpi4py.MPI"].__file__ or "unknown"


def initialize_from_launcher(mpi: Any) -> None:
    """`MPI_Init` under mpiexec or srun, which tell MPI who takes part."""
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)


def initialize_from_socket(mpi: Any, fd: int, rank: int, size: int, one_host: bool) -> None:
    """`MPI_Init` of MPICH with a process manager behind a socket, and no launcher.

    The call goes through ctypes because mpi4py would hold the GIL during it, and with it the threads that
    answer MPI and that notice when a peer has died.

    Args:
        mpi: `mpi4py.MPI`, not initialized.
        fd: where the process manager listens.
        rank: of this process.
        size: number of processes.
        one_host: whether all processes run on this machine; MPI then stays off its outside interfaces.

    Raises:
        MPIUnavailableError: the library is not MPICH, or fails to initialize.
    """
    version, path = library(mpi)
    if not version.startswith("MPICH"):
        raise MPIUnavailableError(
            f"started from TF_CONFIG, tfdist brings up MPICH (or a library with its PMI-1 interface) itself; loaded "
            f"is {version} from {path}. Start the script with that library's mpiexec or with srun instead, or "
            "`pip install mpich`."
        )
    os.environ.update(PMI_FD=str(fd), PMI_RANK=str(rank), PMI_SIZE=str(size))
    if one_host:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("MPIR_CVAR_CH4_NETMOD", "ucx")
    try:
        provided = ctypes.c_int()
        code = ctypes.CDLL(path).MPI_Init_thread(None, None, _THREAD_MULTIPLE, ctypes.byref(provided))
    finally:
        for name in ("PMI_FD", "PMI_RANK", "PMI_SIZE"):  # not for this process's own children
            os.environ.pop(name, None)
    if code != 0:
        raise MPIUnavailableError(f"MPI_Init_thread of {version} from {path} failed with code {code}")
    mpi.COMM_WORLD.Set_errhandler(mpi.ERRORS_RETURN)


_THREAD_MULTIPLE = 3  # MPICH's value; only MPICH comes here


def finalize(mpi: Any) -> None:
    """`MPI_Finalize`, with the GIL free while it waits for the other processes."""
    path = _library_path()
    if path.endswith(".so") and "mpi4py" in path:
        mpi.Finalize()
    else:
        ctypes.CDLL(path).MPI_Finalize()
