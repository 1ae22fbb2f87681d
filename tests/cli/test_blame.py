"""Whose failure came first, by what processes report and how they end."""

import pytest

from tfdist.cli.blame import FailureTracker
from tfdist.cli.process import Process
from tfdist.cluster import launcher


class Ended:
    """Stands for a process that has ended."""

    def __init__(self, returncode):
        self.returncode = returncode


class Reporting(Process):
    """A process whose report is given."""

    def __init__(self, name="rank 1", code=1, trains=True, reports=(), **known):
        super().__init__(name, Ended(code), -1, trains, **known)
        self.reports = list(reports)

    def said(self):
        said, self.reports = set(self.reports), []
        return said


def blame_of(*processes):
    """The blame after processes have reported and ended, in this order."""
    blame = FailureTracker()
    for process in processes:
        blame.hear(process)
        blame.ended(process)
    return blame


def test_successful_processes_are_not_blamed():
    assert blame_of(Reporting(code=0)).processes() == []
    assert not blame_of(Reporting(code=0)).is_known


def test_victim_report_is_remembered():
    process, blame = Reporting(reports=[launcher.VICTIM]), FailureTracker()
    assert blame.hear(process)
    assert not blame.hear(process)
    assert process.is_victim
    assert blame.causes == []


def test_a_cause_is_noted_once_and_before_it_ends():
    process, blame = Reporting(reports=[launcher.CAUSE]), FailureTracker()
    blame.hear(process)
    assert blame.is_known
    process.reports = [launcher.CAUSE]
    blame.hear(process)
    blame.ended(process)
    assert blame.processes() == [process]


def test_first_failed_process_that_is_no_victim_is_blamed():
    victim, cause = Reporting(reports=[launcher.VICTIM]), Reporting(code=-9)
    assert blame_of(victim, cause, Reporting()).processes() == [cause]


def test_one_that_never_reported_is_blamed_before_victims():
    victim, silent = Reporting(reports=[launcher.VICTIM]), Reporting(ended_by_us=True)
    assert blame_of(victim, silent).processes() == [silent, victim]


def test_other_roles_are_blamed_if_no_training_process_failed():
    evaluator = Reporting("evaluator 0", trains=False, reports=[launcher.CAUSE])
    blame = blame_of(evaluator, Reporting(code=0))
    assert not blame.is_known
    assert blame.processes() == [evaluator]
    cause = Reporting()
    assert blame_of(evaluator, cause).processes() == [cause]


@pytest.mark.parametrize("known", [{"ended_by_us": True}, {"is_victim": True}])
def test_other_roles_that_end_with_the_training_are_not_blamed(known):
    assert blame_of(Reporting("ps 0", trains=False, **known)).processes() == []


def test_restarted_process_is_not_blamed():
    process = Reporting(reports=[launcher.CAUSE])
    blame = FailureTracker()
    blame.hear(process)
    assert blame.is_known
    blame.forget(process)
    assert not blame.is_known
    assert blame.processes() == []
