"""Who leads a parameter server, and who takes over: tasks of this process, with a real rendezvous server."""

import contextlib
import threading

import pytest

from tests.runtime.jobs import TIMEOUTS, cluster_of, seen_by
from tfdist.cluster.settings import Timeouts, read_secret
from tfdist.errors import RendezvousError
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.synchronization import Asynchronous
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.messages import Attach, Suspend
from tfdist.parameter_server.worker.client import Connection, MessageRefusedError
from tfdist.runtime import membership, server_host
from tfdist.runtime.server_address import address_of
from tfdist.runtime.server_host import Host
from tfdist.runtime.server_state import ServerStateFactory

DEADLINE = 20.0

pytestmark = pytest.mark.usefixtures("fresh")


class Task:
    """A parameter server's task, whose hosts run on threads."""

    def __init__(self, cluster, index, timeouts=TIMEOUTS):
        self.member = membership.of_task(seen_by(cluster, "ps", index), TIMEOUTS)
        self.errors = []
        self.hosts = []
        for server in (index, (index - 1) % 2):
            template = ServerStateFactory(Arguments(Asynchronous()), cluster.tasks, server, self.member.control)
            self.hosts.append(Host(self.member.control, cluster.tasks, True, template))
        self.threads = [threading.Thread(target=self.run, args=(host, timeouts), daemon=True) for host in self.hosts]
        for thread in self.threads:
            thread.start()

    def run(self, host, timeouts):
        try:
            host.run(Keys.of_secret(read_secret()), timeouts)
        except Exception as error:
            self.errors.append(error)

    def die(self):
        """Leaves as a process that is killed: the rendezvous sees its connection close."""
        self.member.control.close()
        self.member.is_closed = True
        self.end()

    def end(self):
        for host in self.hosts:
            host.stop()
        for thread in self.threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        self.member.close()


@pytest.fixture
def job():
    """A chief, and what makes tasks of two parameter servers."""
    cluster = cluster_of("chief", chief=1, worker=1, ps=2)
    chief = membership.of_task(cluster, TIMEOUTS)
    with contextlib.ExitStack() as stack:

        def start(index, timeouts=TIMEOUTS):
            task = Task(cluster, index, timeouts)
            stack.callback(lambda: None if task.member.is_closed else task.end())
            return task

        yield chief, start
    chief.leave(None)


def connect(chief, server):
    key = address_of(server)
    keys = Keys.of_secret(read_secret())
    return Connection(chief.control.look_up(key), "ps", DEADLINE, keys, moved=lambda: chief.control.known(key))


def test_each_task_leads_its_own_server(job):
    chief, start = job
    tasks = [start(0), start(1)]
    for server in (0, 1):
        connection = connect(chief, server)
        assert connection.request(lambda id: Attach(id, 0, 1, "model"))[0].clock == 0
        connection.close()
    assert [task.errors for task in tasks] == [[], []]


def test_next_server_takes_over_and_copy_is_recreated(job, caplog):
    chief, start = job
    first, second = start(0), start(1)
    connection = connect(chief, 1)
    connection.request(lambda id: Attach(id, 0, 1, "model"))
    second.die()
    with pytest.raises(MessageRefusedError, match="has not attached"):  # the copy answers, over a new connection
        connection.request(lambda id: Suspend(id, 0, 1))
    assert connection.request(lambda id: Attach(id, 0, 1, "model"))[0].clock == 0
    again = start(1)
    while caplog.text.count("has a copy of parameter server 1 again") < 1:
        assert [first.errors, again.errors] == [[], []]
        chief.control.gather("alone", None, (0,))
    first.die()
    with pytest.raises(MessageRefusedError, match="has not attached"):
        connection.request(lambda id: Suspend(id, 0, 1))
    assert connection.request(lambda id: Attach(id, 0, 1, "model"))[0].clock == 0
    assert again.errors == []
    connection.close()


def test_missing_server_for_the_copy_raises(job, caplog, monkeypatch):
    monkeypatch.setattr(server_host, "_PATIENCE_SECONDS", 0.1)
    _, start = job
    alone = start(0, Timeouts(start=0.5, heartbeat=10))
    alone.threads[0].join(DEADLINE)
    (error,) = alone.errors
    assert isinstance(error, RendezvousError)
    assert caplog.text.count("tfdist: waiting for ps 1") == 1
    assert "has not come within 0.5 s: with Servers(copies=1) it has to keep the copy of ps 0" in str(error)


def test_stopping_while_waiting_for_other_server_succeeds(job):
    _, start = job
    alone = start(0)
    alone.end()
    assert alone.errors == []
