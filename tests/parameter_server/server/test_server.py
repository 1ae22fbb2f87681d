"""A server over real sockets, on a thread."""

import contextlib
import os
import socket
import threading

import numpy as np
import pytest
import zmq

from tests.parameter_server.serving import DEADLINE, SIZE, attach, connected, create, pull, push, serving
from tfdist.errors import TfdistError
from tfdist.parameter_server.options.synchronization import BoundedStaleness
from tfdist.parameter_server.server.server import ParameterServer


def test_pull_returns_values_after_a_push():
    with serving() as server, connected(server) as connection:
        attach(connection)
        create(connection)
        assert push(connection).version == 1
        np.testing.assert_array_equal(pull(connection), np.full(SIZE, -1, np.float32))


def test_every_push_of_many_workers_counts_once():
    with serving() as server, contextlib.ExitStack() as stack:
        workers = [stack.enter_context(connected(server)) for _ in range(4)]
        for number, connection in enumerate(workers):
            attach(connection, number)
        create(workers[0])

        def work(number):
            for clock in range(25):
                push(workers[number], number, clock, 0.5)

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        np.testing.assert_array_equal(pull(workers[0]), np.full(SIZE, -50, np.float32))


def test_models_are_updated_independently():
    with serving() as server, connected(server) as first, connected(server) as second:
        for model, connection in enumerate((first, second)):
            attach(connection, model=f"model {model}")
            create(connection)
            push(connection, value=1.0 + model)
        server.lost(7)
        for model, connection in enumerate((first, second)):
            np.testing.assert_array_equal(pull(connection), np.full(SIZE, -1 - model, np.float32))


def test_other_workers_continue_after_a_worker_is_lost():
    with serving(BoundedStaleness(1)) as server, connected(server) as fast, connected(server) as slow:
        attach(fast, 0)
        attach(slow, 1)
        create(fast)
        push(slow, 1)
        push(fast, 0)
        server.lost(1)
        assert push(fast, 0, 1).version == 3


def test_invalid_messages_are_logged_once_and_have_no_effect(caplog):
    with serving() as server, connected(server) as connection:
        attach(connection)
        create(connection)
        context = zmq.Context()
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{server.address}")
        for frames in ([b"hello"], [b"tfps"], [b""], [b"tfps\x04\xc1"], [b"x" * 100_000] * 3):
            stranger.send_multipart(frames)
        with socket.create_connection(("127.0.0.1", int(server.address.rpartition(":")[2]))) as other:
            other.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(1000))
        for clock in range(5):
            push(connection, 0, clock)
        while "ignores invalid messages from 127.0.0.1" not in caplog.text:
            pull(connection)
        stranger.close()
        context.term()
        np.testing.assert_array_equal(pull(connection), np.full(SIZE, -5, np.float32))
    lines = [record.getMessage() for record in caplog.records if "ignores invalid messages" in record.getMessage()]
    assert len(lines) == len(set(lines)) <= 2, "once for each peer; ZeroMQ does not always know which it is"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_server_listens_at_its_own_address(host):
    with serving(address=f"{host}:0") as server, connected(server) as connection:
        assert server.address.startswith(f"{host}:")
        attach(connection)


def test_server_listens_everywhere_if_its_address_is_elsewhere(monkeypatch):
    """As behind a service: the name resolves to an address of another machine (RFC 5737)."""
    original = socket.getaddrinfo

    def elsewhere(host, *args, **options):
        return original("192.0.2.1" if host == "service.example" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", elsewhere)
    with serving(address="service.example:0") as server:
        host, port = server.address.split(":")
        assert host == "service.example"
        with connected(f"127.0.0.1:{port}") as connection:
            attach(connection)


def test_unusable_address_raises():
    with serving() as server, pytest.raises(TfdistError, match=f"cannot listen at {server.address}: Address already"):
        ParameterServer(None, server.address)
    with pytest.raises(TfdistError, match=r"no-such-host\.invalid:1 cannot be resolved"):
        ParameterServer(None, "no-such-host.invalid:1")
