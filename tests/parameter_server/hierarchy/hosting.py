"""Servers of hosts on threads, between sessions of workers and real root servers."""

import contextlib
import threading

from tests.parameter_server.serving import DEADLINE
from tests.parameter_server.worker.test_session import model_of
from tfdist.parameter_server.hierarchy.shard import HostShard, RootAccess
from tfdist.parameter_server.protocol.programs import CHIEF
from tfdist.parameter_server.server.server import ParameterServer
from tfdist.parameter_server.server.shards import Shards
from tfdist.parameter_server.shard.ledger import Ledger
from tfdist.parameter_server.worker.client import Connection
from tfdist.parameter_server.worker.session import Session


def connect_to(roots, timeout=DEADLINE):
    def connect(stack, ended):
        made = [Connection(root.address, f"ps {n}", timeout, failure=ended) for n, root in enumerate(roots)]
        for connection in made:
            stack.callback(connection.close)
        return made

    return connect


@contextlib.contextmanager
def hosting(roots, mode, workers, number=10, timeout=DEADLINE, address="127.0.0.1:0"):
    """Runs the server of a host.

    Args:
        roots: running servers.
        mode: synchronization within the host.
        workers: numbers of the workers on the host.
        number: number of the server's task.
        timeout: seconds that the server waits for a root.
        address: address that the server listens at.
    """

    def make(model, occurrence):
        numbers = tuple(range(20, 20 + len(roots)))
        above = RootAccess(
            number, numbers, CHIEF in workers, connect_to(roots, timeout), lambda event: server.tell(event)
        )
        return HostShard(Ledger(mode, awaited=set(workers)), above=above)

    server = ParameterServer(Shards(make, chief=CHIEF if CHIEF in workers else None), address)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(DEADLINE)
        assert not thread.is_alive()


@contextlib.contextmanager
def workers_of(server, *numbers):
    """Sessions of workers over the server of their host."""
    made = [Session([Connection(server.address, "ps 1", DEADLINE)], number, model_of(1)) for number in numbers]
    try:
        yield made
    finally:
        for session in made:
            session.close()
