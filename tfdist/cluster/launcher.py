"""Reads the environment that a launcher (an MPI launcher or `tfdist run`) gives to a process, and reports to it."""

from __future__ import annotations

import os

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


def size() -> int:
    """Returns the number of processes that the MPI launcher started; 1 without a launcher."""
    for name in _SIZES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 1


REPORT = "TFDIST_REPORT_FD"
"""Environment variable with the file descriptor on which `tfdist run` listens for reports of the process."""

CAUSE, VICTIM, ENTERED = "the cause", "a victim", "entered"


def is_tfdist_run() -> bool:
    """Returns whether `tfdist run` has started this process."""
    return os.environ.get(REPORT, "").isdigit()


def report_to_launcher(what: str) -> None:
    """Tells `tfdist run`, if it started this process, why the process fails, or that it has entered the job.

    Args:
        what: `ENTERED` when the process has entered the job. `VICTIM` when another task's failure is the cause, so that
            `tfdist run` names that task. `CAUSE` when the script itself has failed; sent before the process ends, which
            may take long.
    """
    if is_tfdist_run():
        try:
            os.write(int(os.environ[REPORT]), f"{what}\n".encode())
        except OSError:
            pass
