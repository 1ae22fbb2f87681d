"""The command against parameter servers that are threads of this process."""

import contextlib
import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from tests.multiprocess import harness
from tests.parameter_server.serving import SIZE, attach, connected, create, push, serving
from tfdist.cli import status
from tfdist.cluster import rendezvous
from tfdist.cluster.settings import Timeouts
from tfdist.parameter_server.protocol.curve import Keys
from tfdist.parameter_server.protocol.messages import Inspect

pytestmark = pytest.mark.multiprocess


def command(*arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.cli", "status", *arguments],
        env=harness.environment(**settings),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@contextlib.contextmanager
def trained(keys=None):
    """Two workers have pushed, and the second one is gone."""
    with serving(keys=keys) as server, connected(server, keys=keys) as first, connected(server, keys=keys) as second:
        attach(first, 0)
        attach(second, 1)
        create(first)
        for clock in range(3):
            push(first, 0, clock)
        push(second, 1)
        server.lost(1)
        yield server, first


@pytest.mark.parametrize("secret", [b"", b"the job's secret"])
def test_workers_are_listed_in_a_table(secret):
    """The last push was read before the three others."""
    with trained(Keys.of_secret(secret)) as (server, _):
        ended = command(server.address, "--once", **({"TFDIST_SECRET": secret.decode()} if secret else {}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "model: 0.0 MiB; 4 updates; staleness 1.5, at most 3" in ended.stdout
    rows = [line.replace("│", " ").split() for line in ended.stdout.splitlines() if "task" in line]
    assert [row[:3] for row in rows] == [["task", "0", "3"], ["task", "1", "1"]]
    assert [row[-1] for row in rows] == ["trains", "gone"]


def test_rates_are_those_since_the_last_look():
    with trained() as (_, worker):
        before, _ = worker.request(Inspect)
        for clock in range(3, 13):
            push(worker, 0, clock)
        now, _ = worker.request(Inspect)
    with io.StringIO() as written:
        Console(file=written, width=120).print(status.rendered([now], [before], 2.0))
        text = written.getvalue()
    assert "14 updates, 5 a second" in text
    assert f"{10 * 4 * SIZE / 2 / 2**20:.1f} MiB/s" in text
    assert "5.0" in next(line for line in text.splitlines() if "task 0" in line)


def test_status_refreshes_until_interrupted():
    """On a terminal, where one table takes the place of another."""
    screen, terminal = pty.openpty()
    with trained() as (server, _), open(screen, "rb", buffering=0) as seen:
        arguments = [sys.executable, "-m", "tfdist.cli", "status", server.address, "--seconds", "0.05"]
        looking = subprocess.Popen(arguments, env=harness.environment(), stdout=terminal)
        os.close(terminal)
        try:
            text = b""
            while text.count(b"4 updates, 0 a second") < 2:
                assert select.select([seen], [], [], harness.DEADLINE)[0], text
                text += seen.read(1 << 16)
            looking.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # the terminal has gone with the command
                while seen.read(1 << 16):
                    pass
            assert looking.wait(harness.DEADLINE) == 0
        finally:
            looking.kill()
            looking.wait()


def test_server_without_a_model_is_reported():
    with serving() as server:
        assert "No worker has begun a model yet" in command(server.address, "--once").stdout


def told(capsys, address, monkeypatch, seconds=1.0):
    """What an address that is wrong is answered with."""
    monkeypatch.setattr(status, "_TIMEOUT", seconds)
    assert status._execute(status.argparse.Namespace(address=address, once=True, seconds=1.0)) == 1
    return capsys.readouterr().err


def test_address_without_listener_is_reported(capsys, monkeypatch):
    """As when the job has ended, or at a worker's address."""
    (port,) = harness.free_ports(1)
    text = told(capsys, f"127.0.0.1:{port}", monkeypatch)
    assert f"nothing listens at 127.0.0.1:{port}: the job has ended" in text
    assert 'those of the job "ps" in TF_CONFIG' in text


def test_address_of_the_chief_is_reported(capsys, monkeypatch):
    with rendezvous.listen("127.0.0.1:0") as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        server = rendezvous.ServerProcess(listener, ["chief 0", "ps 0"], 1, "", b"", Timeouts(), is_elastic=True)
        try:
            assert f"{address} is the address of the job's chief" in told(capsys, address, monkeypatch, 30.0)
        finally:
            server.close(0.1)


def test_address_of_another_program_is_reported(capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: listener.accept()[0].sendall(b"HTTP/1.1"), daemon=True)
        thread.start()
        assert f"the process that listens at {address} is not a parameter server" in told(capsys, address, monkeypatch)
        thread.join(100)


def test_different_secret_is_reported(capsys, monkeypatch):
    """CURVE does not tell it from a server that is gone."""
    with serving(keys=Keys.of_secret(b"a secret")) as server:
        assert "it has another secret (TFDIST_SECRET)" in told(capsys, server.address, monkeypatch, 0.3)


@pytest.mark.parametrize("address", ["host", ":2222", "host:port"])
def test_invalid_address_is_reported(capsys, monkeypatch, address):
    assert f"expected host:port of a parameter server; got {address!r}" in told(capsys, address, monkeypatch)


def test_the_address_may_come_from_tf_config(capsys, monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert "or TF_CONFIG with one" in told(capsys, None, monkeypatch)
    with serving() as server:
        cluster = {"worker": ["127.0.0.1:1"], "ps": [server.address]}
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}))
        assert status._execute(status.argparse.Namespace(address=None, once=True, seconds=1.0)) == 0
