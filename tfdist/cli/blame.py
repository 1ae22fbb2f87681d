"""Whose failure came first among the processes of one `tfdist run`."""

from __future__ import annotations

from tfdist.cli.process import Process
from tfdist.cluster import launcher


class Blame:
    """Finds out which process's failure came first.

    Attributes:
        failed: the training processes that ended with an error, in the order in which it became known.
        causes: those of them that did not fail because of others.
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
        """Reads what a process reports of its failure; False when it reported nothing."""
        said = process.said()
        process.is_victim = process.is_victim or launcher.VICTIM in said
        process.has_entered = process.has_entered or launcher.ENTERED in said
        if launcher.CAUSE in said and process.trains and process not in self.causes:
            self.causes.append(process)
        return bool(said)

    def ended(self, process: Process) -> None:
        """Takes note of a process that has ended."""
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
        """Takes no note of a process that is started again."""
        self.causes = [one for one in self.causes if one is not process]

    def processes(self) -> list[Process]:
        """The process to be blamed first, then others whose output helps; none if all succeeded."""
        if self.causes or not self.failed:
            return self.causes[:1] or self.others[:1]
        # All that ended by themselves report another as the cause: one that never reported anything, if there is one.
        silent = [process for process in self.failed if not process.is_victim]
        victims = [process for process in self.failed if process.is_victim]
        return [*silent[:1], *victims[:1]]
