"""Connections to servers that are slow, late, gone, or killed and started again."""

import itertools
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.multiprocess import harness
from tests.parameter_server.serving import DEADLINE, attach, connected, create, push, serving
from tfdist.errors import PeerLostError, TfdistError
from tfdist.parameter_server.options.synchronization import BoundedStaleness
from tfdist.parameter_server.protocol.messages import Attach, Refused
from tfdist.parameter_server.worker import client as clients
from tfdist.parameter_server.worker.client import MessageRefusedError


def test_wait_has_no_deadline_while_the_server_lives(monkeypatch):
    """Longer than a client waits for a sign of life."""
    monkeypatch.setattr(clients, "_AGAIN_SECONDS", 0.05)
    with serving(BoundedStaleness(1)) as server, connected(server, 0.4) as fast, connected(server) as slow:
        attach(fast, 0)
        attach(slow, 1)
        create(fast)
        push(slow, 1)
        push(fast, 0)
        begin, seen = time.monotonic(), []
        thread = threading.Thread(target=lambda: seen.append(push(fast, 0, 1)), daemon=True)
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
        push(slow, 1, 1)
        thread.join(DEADLINE)
        assert seen
        assert time.monotonic() - begin > 0.9


def test_requests_to_several_servers_run_concurrently():
    with serving() as a, serving() as b, connected(a) as first, connected(b) as second:
        requests = [connection.send(lambda id: Attach(id, 0, 1, "model")) for connection in (first, second)]
        for connection, request in zip((second, first), reversed(requests), strict=True):
            assert connection.receive(request)[0].clock == 0


def test_a_refusal_is_an_error():
    with serving() as server, connected(server) as connection:
        with pytest.raises(MessageRefusedError, match="ps 0 refuses Push: this connection has not attached") as caught:
            push(connection)
        assert caught.value.refused.is_unknown


@pytest.mark.parametrize("is_told", [True, False])
def test_rendezvous_error_replaces_the_servers_refusal(monkeypatch, is_told):
    """The error is what the rendezvous then says of that worker; the server's, if it says nothing."""
    monkeypatch.setattr(clients, "_NEWS_SECONDS", DEADLINE if is_told else 0.2)
    news = itertools.chain([None] * 3, itertools.repeat(PeerLostError("rank 1 died") if is_told else None))
    with serving() as server, connected(server) as connection:
        connection._answer = lambda id, seconds: (Refused(id, "worker 1 has ended", ended=1), [])
        connection._failure = lambda: next(news)
        with pytest.raises(
            PeerLostError if is_told else MessageRefusedError, match="rank 1 died" if is_told else "has ended"
        ):
            attach(connection, 0)


def test_request_waits_for_a_late_server(monkeypatch):
    monkeypatch.setattr(clients, "_AGAIN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with connected(address) as connection:
        attached = []
        thread = threading.Thread(target=lambda: attached.append(attach(connection)), daemon=True)
        thread.start()
        with serving(address=address):
            thread.join(DEADLINE)
            assert attached


def test_a_job_that_has_failed_is_not_waited_for(monkeypatch):
    """As after Ctrl-C, while the server says that others are slow."""
    monkeypatch.setattr(clients, "_LOOK_SECONDS", 0.05)
    failures = []
    with serving(BoundedStaleness(1)) as server, connected(server) as slow:
        connection = clients.Connection(server.address, "ps 0", DEADLINE, failure=lambda: next(iter(failures), None))
        attach(connection, 0)
        attach(slow, 1)
        create(connection)
        push(slow, 1)
        push(connection, 0)
        seen = []

        def wait():
            try:
                push(connection, 0, 1)
            except TfdistError as error:
                seen.append(str(error))

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        failures.append(TfdistError("interrupted (Ctrl-C)"))
        thread.join(DEADLINE)
        assert seen == ["interrupted (Ctrl-C)"]
        connection.close()


def test_missing_server_raises_after_the_timeout():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with (
        connected(address, timeout=0.3) as connection,
        pytest.raises(PeerLostError, match=r"ps 0 at 127.0.0.1:\d+ has not answered for 0.3 s"),
    ):
        attach(connection)


def test_connection_finds_a_restarted_server_process(monkeypatch):
    """The connection finds the new one by itself; it has to be told of the worker and the model again."""
    monkeypatch.setattr(clients, "_AGAIN_SECONDS", 0.2)
    program = str(harness.PROGRAMS / "one_server.py")
    with harness.started([program, "127.0.0.1:0"], 1) as first:
        first.await_output(0, " now")
        address = first.output(0).partition("SERVING ")[2].split()[0]
        with connected(address) as connection:
            attach(connection)
            create(connection)
            push(connection)
            first.signal(0, signal.SIGKILL)
            first.wait()
            with harness.started([program, address], 1) as second:
                second.await_output(0, " now")
                with pytest.raises(MessageRefusedError) as caught:
                    push(connection, clock=1)
                assert caught.value.refused.is_unknown
                assert not attach(connection).is_created


def test_garbage_collected_connection_does_not_hang():
    """Garbage in a cycle, as after an exception, is collected in an order in which ZeroMQ waits for ever."""
    program = """
import gc
from tfdist.parameter_server.worker.client import Connection
connection = Connection("127.0.0.1:1", "ps 0", 1.0)
connection.itself = connection
del connection
gc.collect()
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=harness.DEADLINE)
