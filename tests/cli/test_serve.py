"""Arguments of the command; `tests/multiprocess/test_serve.py` has a job."""

import json
import sys

import pytest

from tfdist.cli import main
from tfdist.runtime import serving

JOBS = {"chief": ["host0:1"], "ps": ["host1:1", "host2:2"]}


@pytest.fixture
def served(monkeypatch):
    clusters = []
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(serving, "serve_without_script", lambda cluster, timeouts: clusters.append(cluster))
    for name in ("CUDA_VISIBLE_DEVICES", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(name, "")
    return clusters


def test_task_is_read_from_tf_config(served, monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": JOBS, "task": {"type": "ps", "index": 1}}))
    assert main.main(["serve"]) == 0
    assert str(served[0].task) == "ps 1 (host2:2)"


def test_task_is_read_from_arguments(served):
    assert main.main(["serve", "--cluster", json.dumps(JOBS), "--index", "1"]) == 0
    assert main.main(["serve", "--cluster", json.dumps(JOBS)]) == 0
    assert [str(cluster.task) for cluster in served] == ["ps 1 (host2:2)", "ps 0 (host1:1)"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], 'expected a cluster with a job "ps": set TF_CONFIG'),
        (["--cluster", "{"], "--cluster is not JSON"),
        (["--cluster", "[]"], "--cluster must be a JSON object of jobs"),
        (["--cluster", json.dumps(JOBS), "--index", "2"], "this process is ps 2, but the cluster has 2 task(s)"),
        (["--cluster", json.dumps(JOBS), "--import", "no_such"], "--import no_such: No module named"),
    ],
)
def test_invalid_arguments_are_refused_with_a_message(served, capsys, arguments, words):
    assert main.main(["serve", *arguments]) == 1
    assert words in capsys.readouterr().err
    assert served == []


def test_a_worker_is_no_server(served, monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": JOBS, "task": {"type": "chief", "index": 0}}))
    assert main.main(["serve"]) == 1
    assert 'expected TF_CONFIG of a task of the job "ps"; got chief 0 (host0:1)' in capsys.readouterr().err


def test_modules_are_imported_from_the_working_folder(served, monkeypatch, tmp_path):
    (tmp_path / "own_module_of_serve.py").write_text("VALUE = 1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    assert main.main(["serve", "--cluster", json.dumps(JOBS), "--import", "own_module_of_serve"]) == 0
    assert sys.modules.pop("own_module_of_serve").VALUE == 1
