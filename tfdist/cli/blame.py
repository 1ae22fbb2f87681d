"""Finds out which of the processes of one `tfdist run` failed first."""

from __future__ import annotations

from tfdist.cli.process import Process
from tfdist.cluster import launcher


class FailureTracker:
    """The failures of a job's processes, in their order.

    Attributes:
        failed: training processes that ended with an error, in the order in which they ended.
        causes: training processes that did not fail because of others, in the order in which this became known.
        others: parameter servers and evaluators that ended with an error.
    """

    def __init__(self) -> None:
        self.failed: list[Process] = []
        self.causes: list[Process] = []
        self.others: list[Process] = []

    @property
    def is_known(self) -> bool:
        """Whether a training process has failed."""
        return bool(self.failed or self.causes)

    def hear(self, process: Process) -> bool:
        """Reads a process's reports about its failure. Returns whether there were any."""
        said = process.said()
        process.is_victim = process.is_victim or launcher.VICTIM in said
        process.has_entered = process.has_entered or launcher.ENTERED in said
        if launcher.CAUSE in said and process.trains and process not in self.causes:
            self.causes.append(process)
        return bool(said)

    def ended(self, process: Process) -> None:
        """Notes that a process has ended."""
        if process.popen.returncode == 0:
            return
        if not process.trains:
            if not process.ended_by_us and not process.is_victim:
                self.others.append(process)
            return
        self.failed.append(process)
        if not process.is_victim and not process.ended_by_us and process not in self.causes:
            self.causes.append(process)

    def forget(self, process: Process) -> None:
        """Forgets the failure of a process that is started again."""
        self.causes = [cause for cause in self.causes if cause is not process]

    def processes(self) -> list[Process]:
        """Returns the process to blame, then others whose output helps; an empty list if all succeeded."""
        if self.causes or not self.failed:
            return self.causes[:1] or self.others[:1]
        # All processes that ended by themselves blame another one: so take a process that never reported anything.
        silent = [process for process in self.failed if not process.is_victim]
        victims = [process for process in self.failed if process.is_victim]
        return [*silent[:1], *victims[:1]]
