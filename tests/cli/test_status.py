"""The command against parameter servers that are threads of this process."""

import contextlib
import io
import subprocess
import sys

import pytest
from rich.console import Console

from tests.multiprocess import harness
from tests.parameter_server.serving import SIZE, attach, connected, create, push, serving
from tfdist.cli import status
from tfdist.parameter_server.curve import Keys
from tfdist.parameter_server.messages import Inspect

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
    with serving(keys=keys) as server, connected(server, keys=keys) as one, connected(server, keys=keys) as other:
        attach(one, 0)
        attach(other, 1)
        create(one)
        for clock in range(3):
            push(one, 0, clock, pulls=True)
        push(other, 1)
        server.lost(1)
        yield server, one


@pytest.mark.parametrize("secret", [b"", b"the job's secret"])
def test_a_table_of_workers(secret):
    """The last push was read before the three others."""
    with trained(Keys.of_secret(secret)) as (server, _):
        ended = command(server.address, "--once", **({"TFDIST_SECRET": secret.decode()} if secret else {}))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "model: 0.0 MiB; 4 updates; staleness 1.5, at most 3" in ended.stdout
    rows = [line.replace("│", " ").split() for line in ended.stdout.splitlines() if "task" in line]
    assert [row[:3] for row in rows] == [["task", "0", "3"], ["task", "1", "1"]]
    assert [row[-1] for row in rows] == ["trains", "gone"]


def test_rates_are_those_since_the_last_look():
    with trained() as (_, one):
        before, _ = one.request(Inspect)
        for clock in range(3, 13):
            push(one, 0, clock)
        now, _ = one.request(Inspect)
    with io.StringIO() as written:
        Console(file=written, width=120).print(status.rendered([now], [before], 2.0))
        text = written.getvalue()
    assert "14 updates, 5 a second" in text
    assert f"{10 * 4 * SIZE / 2 / 2**20:.1f} MiB/s" in text
    assert "5.0" in next(line for line in text.splitlines() if "task 0" in line)


def test_nothing_is_trained_yet():
    with serving() as server:
        assert "No worker has begun a model yet" in command(server.address, "--once").stdout


def test_a_server_that_does_not_answer(monkeypatch, capsys):
    monkeypatch.setattr(status, "_TIMEOUT", 0.3)
    (port,) = harness.free_ports(1)
    options = status.argparse.Namespace(address=f"127.0.0.1:{port}", once=True, seconds=1.0)
    assert status._execute(options) == 1
    assert f"127.0.0.1:{port} has not answered for 0.3 s" in capsys.readouterr().err
