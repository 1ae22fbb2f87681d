"""One process of `tfdist run`."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass


@dataclass
class Process:
    """One task of the job.

    Attributes:
        name: ``"rank 0"``, ``"ps 0"`` or ``"evaluator 0"``.
        popen: the process, the leader of a process group.
        report: the file descriptor on which it reports its failure; see `tfdist.cluster.launcher.tell`.
        trains: whether it has a rank.
        is_victim: whether it reported that another one's failure was the cause.
        ended_by_us: whether the launcher had to end it.
        is_restart: whether it was started in place of one that failed.
        has_entered: whether it has reported that it is in the job.
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
        """What it has reported since the last time."""
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
