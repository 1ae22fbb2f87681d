"""Memberships of several tasks, all in this process, in jobs with real server processes."""

import contextlib
import dataclasses
import queue
import socket
from pathlib import Path

import pytest

from tests.runtime.jobs import TIMEOUTS, cluster_of, seen_by
from tfdist.cluster import connection
from tfdist.cluster.settings import Timeouts
from tfdist.errors import RendezvousError
from tfdist.runtime import membership

DEADLINE = 20.0

pytestmark = pytest.mark.usefixtures("fresh")


@contextlib.contextmanager
def entered(cluster, *tasks):
    """The memberships of tasks of a cluster."""
    with contextlib.ExitStack() as stack:
        made = [membership.of_task(seen_by(cluster, *task), TIMEOUTS) for task in tasks]
        for member in made:
            stack.callback(lambda member: member.is_closed or member.close(), member)
        yield made


def test_tasks_enter_without_waiting_for_each_other():
    cluster = cluster_of("chief", chief=1, worker=1, ps=1)
    with entered(cluster, ("chief", 0), ("ps", 0)) as (chief, ps):
        assert (chief.control.task, ps.control.task) == (0, 2)
        assert chief.control.job == ps.control.job
        assert chief.server is not None
        assert ps.server is None
        ps.control.publish("address", "tcp://127.0.0.1:1")
        assert chief.control.look_up("address") == "tcp://127.0.0.1:1"


def test_an_evaluator_that_is_not_listed_enters():
    cluster = cluster_of("worker", worker=2)
    with entered(cluster, ("worker", 0), ("evaluator", 0)) as (chief, evaluator):
        assert evaluator.control.task == 2
        assert chief.control.task == 0


def test_an_additional_worker_enters_an_elastic_job():
    with entered(cluster_of("chief", chief=1, ps=1), ("chief", 0), ("worker", 5)) as (_, worker):
        assert worker.control.task == 2


def test_the_server_ends_with_the_last_training_task():
    cluster = cluster_of("worker", worker=2)
    with entered(cluster, ("worker", 0)) as (chief,):
        process = chief.server._process
        assert process.poll() is None
        chief.close()
        assert process.poll() == 0


@pytest.mark.parametrize("mpi", [False, True])
def test_the_server_outlives_a_chief_that_others_still_need(mpi):
    """With MPI, these are groups that the chief's death leaves alone."""
    cluster = cluster_of("chief", chief=1, worker=1, ps=1)
    with entered(cluster, ("chief", 0), ("worker", 0), ("ps", 0)) as (chief, worker, ps):
        while 2 not in chief.control.present:
            chief.control.gather("all", None, (0,))
        process = chief.server._process
        chief.started = object() if mpi else None
        chief.leave(None)
        worker.control.publish("x", "1")
        assert ps.control.look_up("x") == "1"
        worker.leave(None)
        assert process.wait(DEADLINE) == 0


class Lost:
    """Keeps the tasks that are lost and that come."""

    def __init__(self):
        self.events = queue.SimpleQueue()

    def lost(self, task, error):
        self.events.put(("lost", task))

    def left(self, task):
        pass

    def came(self, task):
        self.events.put(("came", task))

    def over(self):
        pass


def test_a_chief_of_an_elastic_job_comes_back_to_its_server():
    """Its connection breaks, as when its process is killed; the server and the others are still there."""
    cluster = cluster_of("chief", chief=1, worker=1, ps=1)
    with entered(cluster, ("chief", 0), ("ps", 0)) as (chief, ps):
        watcher = Lost()
        ps.control.watch(watcher)
        job = chief.control.job
        chief.control.close()
        while watcher.events.get(timeout=DEADLINE) != ("lost", 0):
            pass
        with entered(cluster, ("chief", 0)) as (again,):
            assert again.server is None
            assert again.control.job == job
            assert watcher.events.get(timeout=DEADLINE) == ("came", 0)
        chief.is_closed = True
        chief.server.release()


@pytest.mark.parametrize("servers", [0, 1])
def test_another_program_at_the_chiefs_port_is_an_error(servers, monkeypatch):
    """Also where servers may have outlived the chief that started them, and the program might be one of them."""
    monkeypatch.setattr(connection, "_ANSWER_SECONDS", 0.5)
    cluster = cluster_of("worker", worker=2, **({"ps": servers} if servers else {}))
    assert cluster.is_elastic is bool(servers)
    host, port = cluster.tasks[0].address.split(":")
    timeouts = dataclasses.replace(TIMEOUTS, start=0.5)
    with socket.create_server((host, int(port))), pytest.raises(RendezvousError, match="another process uses it"):
        membership.of_task(seen_by(cluster, "worker", 0), timeouts)


def test_wrong_secret_raises(monkeypatch):
    cluster = cluster_of("worker", worker=2)
    with entered(cluster, ("worker", 0)):
        monkeypatch.setenv("TFDIST_SECRET", "another")
        with pytest.raises(RendezvousError, match="wrong or missing secret"):
            membership.of_task(seen_by(cluster, "worker", 1), TIMEOUTS)


def test_unreachable_chief_raises():
    cluster = cluster_of("worker", worker=2)
    with pytest.raises(RendezvousError, match=r"could not be reached within 0.2 s .* Missing: the chief"):
        membership.of_task(seen_by(cluster, "worker", 1), Timeouts(start=0.2))


def test_missing_secret_logs_a_warning(monkeypatch, caplog):
    monkeypatch.delenv("TFDIST_SECRET")
    with entered(cluster_of("worker", worker=2), ("worker", 0)):
        pass
    assert "every process on this machine (127.0.0.1:" in caplog.text
    assert "can enter this job. Set TFDIST_SECRET" in caplog.text


def test_abandoning_tells_the_others_why():
    cluster = cluster_of("worker", worker=2)
    with entered(cluster, ("worker", 0), ("worker", 1)) as (chief, other):
        other.abandon(ValueError("no MPI here"))
        assert other.is_closed
        with pytest.raises(RendezvousError, match=r"rank 1, worker 1 .* failed: ValueError: no MPI here"):
            chief.control.bind(None, 2)


def test_abandoning_removes_the_names_of_shared_memory():
    """The server, which removes them at its end, may be on another machine."""
    with entered(cluster_of("worker", worker=2), ("worker", 0), ("worker", 1)) as (_, other):
        left = Path("/dev/shm", f"{other.control.job}_1")
        left.touch()
        try:
            other.abandon(ValueError("no MPI here"))
            assert not left.exists()
        finally:
            left.unlink(missing_ok=True)
