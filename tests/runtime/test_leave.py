"""What a process tells the others as it ends; `tests/multiprocess/test_endings.py` has processes that end."""

import os
import signal
from types import SimpleNamespace

import pytest

from tests.runtime.jobs import TIMEOUTS, cluster_of, seen_by
from tfdist.cluster import launcher
from tfdist.errors import PeerLostError, RendezvousError, TfdistError
from tfdist.runtime import leave, membership

pytestmark = pytest.mark.usefixtures("fresh")


class Control:
    """Keeps what the task tells the others."""

    def __init__(self, failure=None):
        self.failure, self.fails_first, self.told = failure, False, []

    def tell_failure(self, error):
        self.told.append(error)


@pytest.fixture
def reports(monkeypatch):
    """What `tfdist run` is told."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setenv(launcher.REPORT, str(writing))

    def read():
        try:
            return os.read(reading, 100).decode().splitlines()
        except BlockingIOError:
            return []

    yield read
    os.close(reading)
    os.close(writing)


def raised(control, error):
    """Ends a script with an error; returns what the hook before ours has seen."""
    seen = []
    cluster = SimpleNamespace(rank=1, task=None)
    hook = leave._reporting_excepthook(
        SimpleNamespace(control=control, cluster=cluster), lambda *arguments: seen.append(arguments)
    )
    hook(type(error), error, None)
    return seen


def test_script_error_is_sent_to_others_and_reported(reports):
    control, error = Control(), ValueError("a mistake")
    assert raised(control, error) == [(ValueError, error, None)]
    assert control.told == [error]
    assert control.fails_first
    assert reports() == [launcher.CAUSE]


def test_error_after_failure_of_another_is_not_sent(reports):
    control = Control(failure=PeerLostError("rank 1 died"))
    raised(control, ValueError("a consequence"))
    assert control.told == []
    assert reports() == [launcher.VICTIM]


def test_peer_lost_error_is_reported_as_consequence(reports):
    """Other groups of the process go on, so that its connection knows of no failure."""
    control = Control()
    raised(control, PeerLostError("rank 1 died"))
    assert control.told == []
    assert reports() == [launcher.VICTIM]


def test_tfdist_error_is_not_sent_again(reports):
    control = Control()
    raised(control, TfdistError("rank 0 waited"))
    assert control.told == []
    assert reports() == []


def test_task_without_mpi_sends_its_failure_on_exit(monkeypatch):
    cluster = cluster_of("worker", worker=2, evaluator=1)
    chief = membership.of_task(seen_by(cluster, "worker"), TIMEOUTS)
    evaluator = membership.of_task(seen_by(cluster, "evaluator"), TIMEOUTS)
    try:
        leave._leave(evaluator, os.getpid() + 1, None)
        assert not evaluator.is_closed, "a forked child leaves that to its parent"
        monkeypatch.setattr("sys.last_value", ValueError("no data"), raising=False)
        leave._leave(evaluator, os.getpid(), None)
        assert evaluator.is_closed
        with pytest.raises(RendezvousError, match=r"evaluator 0 .* failed: ValueError: no data"):
            chief.control.gather("values", None, (0, 2))
        leave._leave(evaluator, os.getpid(), None)  # nothing is left to leave
    finally:
        chief.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (KeyboardInterrupt(), "tfdist: rank 1 was interrupted.\n"),
        (
            PeerLostError("rank 0 failed: KeyboardInterrupt: "),
            "tfdist: rank 1 ended, because rank 0 failed: KeyboardInterrupt.\n",
        ),
        (TfdistError("interrupted (Ctrl-C)"), "tfdist: rank 1 was interrupted.\n"),
    ],
)
def test_interrupt_prints_one_line(reports, capsys, monkeypatch, error, told):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert raised(Control(), error) == []
    assert capsys.readouterr().err == told
