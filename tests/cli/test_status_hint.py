import os
import shlex

import pytest

from tfdist.cli import status_hint
from tfdist.cluster.settings import read_secret
from tfdist.cluster.spec import Task

TASKS = [Task("worker", 0, "127.0.0.1:1"), Task("ps", 0, "127.0.0.1:2"), Task("ps", 1, "127.0.0.1:3")]


def forbidden(name):
    raise PermissionError


@pytest.mark.parametrize("in_memory", [True, False])
def test_printed_command_names_address_and_private_secret_file(capsys, monkeypatch, in_memory):
    """Which nobody else may read, and which goes with the job."""
    monkeypatch.delenv("TFDIST_SECRET", raising=False)
    if not in_memory:
        monkeypatch.setattr(os, "memfd_create", forbidden)
    with status_hint.told(TASKS, b"the secret"):
        said = capsys.readouterr().err
        setting, *command = shlex.split(said.split("`")[1])
        name, _, path = setting.partition("=")
        assert command == ["tfdist", "status", "127.0.0.1:2"]
        monkeypatch.setenv(name, path)
        assert read_secret() == b"the secret"
        assert os.stat(path).st_mode & 0o077 == 0
        assert path.startswith("/proc/") is in_memory, "which goes with a launcher that is killed, too"
    assert "the secret" not in said
    assert not os.path.exists(path)


def test_secret_file_is_removed_when_the_job_fails(capsys):
    paths = []

    def interrupted():
        with status_hint.told(TASKS, b"the secret"):
            paths.append(shlex.split(capsys.readouterr().err.split("`")[1])[0].partition("=")[2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not os.path.exists(paths[0])


def test_job_without_servers_prints_no_hint(capsys):
    with status_hint.told(TASKS[:1], b"the secret"):
        assert capsys.readouterr().err == ""
