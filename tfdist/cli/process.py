"""A process of `tfdist run`."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass


@dataclass
class Process:
    """The process of one task of the job.

    Attributes:
        name: name of the task, such as ``"rank 0"``, ``"ps 0"`` or ``"evaluator 0"``.
        popen: the process, which leads a process group.
        report: file descriptor with the process's reports; see `tfdist.cluster.launcher.report_to_launcher`.
        trains: whether the process has a rank.
        is_victim: whether the process reported another process's failure as the cause.
        ended_by_us: whether the launcher had to end the process.
        is_restart: whether the process was started in place of a failed one.
        has_entered: whether the process has reported that it has entered the job.
    """

    name: str
    popen: subprocess.Popen[bytes]
    report: int
    trains: bool = True
    is_victim: bool = False
    ended_by_us: bool = False
    is_restart: bool = False
    has_entered: bool = False

    def said(self) -> set[str]:
        """Returns the process's reports since the last call."""
        try:
            return set(os.read(self.report, 4096).decode(errors="replace").splitlines())
        except BlockingIOError:
            return set()

    def signal(self, number: int) -> None:
        """Sends a signal to the process and its children."""
        try:
            os.killpg(self.popen.pid, number)
        except ProcessLookupError:
            pass
