"""A parameter server in its job: tasks of this process, with a real rendezvous server."""

import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.parameter_server.options.test_published import options_of
from tests.runtime.jobs import TIMEOUTS, cluster_of, seen_by
from tfdist.cluster.settings import read_secret
from tfdist.compression import Int8
from tfdist.errors import TfdistError
from tfdist.parameter_server import Asynchronous, BoundedStaleness, Gradients, Servers
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.messages import Attach, Inspect, Pull
from tfdist.parameter_server.server.server import ParameterServer
from tfdist.parameter_server.worker.client import Connection
from tfdist.runtime import agreement, membership, serving
from tfdist.runtime.server_address import address_of

DEADLINE = 20.0

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def members():
    """Yields the memberships of a chief, a worker and a server, the server's thread, and its errors."""
    cluster = cluster_of("chief", chief=1, worker=1, ps=1)
    made = [membership.of_task(seen_by(cluster, job), TIMEOUTS) for job in ("chief", "worker", "ps")]
    errors = []

    def serve():
        try:
            serving.serve(made[2], Arguments(BoundedStaleness(0)), TIMEOUTS)
        except (TfdistError, KeyboardInterrupt) as error:
            errors.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield *made, thread, errors
    for member in made[:2]:
        if not member.is_closed:
            member.leave(None)
    thread.join(DEADLINE)
    assert not thread.is_alive()
    made[2].close()


def connect(member):
    address = member.control.look_up(address_of(0))
    return Connection(address, "ps 0", DEADLINE, Keys.of_secret(read_secret()))


def test_workers_find_the_server_by_its_address(members):
    connection = connect(members[0])
    answer, _ = connection.request(lambda id: Attach(id, 0, 1, "model"))
    assert answer.clock == 0
    connection.close()


def test_reports_have_the_names_of_workers_that_join(members):
    cluster = members[0].cluster
    joined = membership.of_task(seen_by(cluster, "worker", 5), TIMEOUTS)
    connection = connect(joined)
    connection.request(lambda id: Attach(id, joined.control.task, 1, "model"))
    while joined.control.task not in members[2].control.present:
        members[2].control.look_up(address_of(0))
    report, _ = connection.request(Inspect)
    assert [name.partition(" (")[0] for name in report.tasks] == ["chief 0", "worker 0", "ps 0", "worker 5"]
    connection.close()
    joined.leave(None)


@pytest.mark.parametrize("how", ["dies", "ends"])
def test_server_detaches_workers_that_die_or_end(members, how):
    chief, worker, _, _, _ = members
    connection = connect(chief)
    for number in (0, 1):
        connection.request(lambda id, number=number: Attach(id, number, 1, "model"))
    if how == "dies":
        worker.control.close()
        worker.is_closed = True
    else:
        worker.leave(None)
    while chief.control.present.get(1):
        chief.control.gather("alone", None, (0,))
    with pytest.raises(TfdistError, match="has not attached"):
        connection.request(lambda id: Pull(id, 1, 1))
    connection.close()


def test_the_server_ends_with_the_job(members):
    for member in members[:2]:
        member.leave(None)
    members[3].join(DEADLINE)
    assert not members[3].is_alive()
    assert members[4] == []


def test_a_job_that_fails_ends_the_server_with_its_error(members):
    members[2].control.fail(TfdistError("interrupted (Ctrl-C)"))
    members[3].join(DEADLINE)
    assert [str(error) for error in members[4]] == ["interrupted (Ctrl-C)"]


def test_an_interrupted_server_ends_with_the_interrupt(members, monkeypatch):
    """Also where the job has failed of it first: the end of the process is then told in one line."""

    def receive(server):
        members[2].control.fail(TfdistError("interrupted (Ctrl-C)"))
        raise KeyboardInterrupt

    monkeypatch.setattr(ParameterServer, "_receive", receive)
    connection = connect(members[0])
    connection.send(lambda id: Attach(id, 0, 1, "model"))
    members[3].join(DEADLINE)
    connection.close()
    assert list(map(type, members[4])) == [KeyboardInterrupt]


@dataclass(frozen=True)
class Halved:
    """A policy of a user's."""

    def scale(self, staleness):
        return 0.5


def test_server_without_script_uses_the_workers_options(monkeypatch):
    served, cluster = [], cluster_of("chief", chief=1, ps=1)
    monkeypatch.setattr(serving, "serve", lambda *arguments: served.append(arguments))
    chief = membership.of_task(cluster, TIMEOUTS)
    agreement.agree(chief, options_of(BoundedStaleness(2), Gradients(Int8()), Servers(snapshots="folder", copies=1)))
    serving.serve_without_script(seen_by(cluster, "ps"), TIMEOUTS)
    ((member, options, _),) = served
    assert (options.synchronization, options.has_copies) == (BoundedStaleness(2), True)
    assert options.snapshots == (Path("folder"), 60.0)
    assert repr(options.pushes) == repr(Gradients(Int8()))
    member.leave(None)
    chief.leave(None)


def test_server_without_script_rejects_user_defined_classes():
    cluster = cluster_of("chief", chief=1, ps=1)
    chief = membership.of_task(cluster, TIMEOUTS)
    agreement.agree(chief, options_of(Asynchronous(Halved())))
    with pytest.raises(
        TfdistError,
        match=r"synchronization is Asynchronous\(late=.*Halved.*Run the script on the parameter servers, too",
    ):
        serving.serve_without_script(seen_by(cluster, "ps"), TIMEOUTS)
    chief.leave(None)


def test_a_server_without_script_that_cannot_listen_tells_the_chief(caplog):
    cluster = cluster_of("chief", chief=1, ps=1)
    chief = membership.of_task(cluster, TIMEOUTS)
    agreement.agree(chief, options_of(Asynchronous()))
    own = seen_by(cluster, "ps")
    host, port = own.task.address.split(":")
    with socket.create_server((host, int(port))), pytest.raises(TfdistError, match="cannot listen"):
        serving.serve_without_script(own, TIMEOUTS)
    deadline = time.monotonic() + DEADLINE
    while "failed: the parameter server cannot listen at" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    chief.leave(None)
