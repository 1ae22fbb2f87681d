"""What a launcher puts into a process's environment: mpiexec, srun and `tfdist run`."""

from __future__ import annotations

import os

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def size() -> int:
    """How many processes the MPI launcher started; 1 when there is none."""
    for name in _SIZES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


REPORT = "TFDIST_REPORT_FD"
"""Where `tfdist run` listens for what a process has to say about its job, and its own failure."""

CAUSE, VICTIM, ENTERED = "the cause", "a victim", "entered"


def is_tfdist_run() -> bool:
    """Whether `tfdist run` has started this process."""
    return os.environ.get(REPORT, "").isdigit()


def tell(what: str) -> None:
    """Tells `tfdist run`, if it started this process, how the process came to fail, or that it is in the job.

    Args:
        what: `ENTERED` when the process has entered the job. `VICTIM` when another task's failure is the cause: then
            that one is to be named. `CAUSE` when the script has failed by an error of its own; told before the process
            ends, which may take long.
    """
    if is_tfdist_run():
        try:
            os.write(int(os.environ[REPORT]), f"{what}\n".encode())
        except OSError:
            pass
