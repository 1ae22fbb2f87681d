import json
import socket
import subprocess
import sys

import pytest

from tests.multiprocess import harness

pytestmark = pytest.mark.multiprocess


def doctor(*arguments, **settings):
    return subprocess.run(
        [sys.executable, "-m", "tfdist.cli", "doctor", *arguments],
        env=harness.environment(**settings),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_doctor_reports_versions_and_a_lone_process():
    ended = doctor()
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for subject in ("tfdist", "keras", "TensorFlow", "mpi4py", "MPI ", "CPU", "cluster"):
        assert subject in ended.stdout
    assert "MPICH" in ended.stdout
    assert "a script started like this runs alone" in ended.stdout


def test_missing_gpus_are_reported_as_a_problem():
    ended = doctor("--gpu", CUDA_VISIBLE_DEVICES="-1")
    assert ended.returncode == 1
    assert "PROBLEM  GPU " in ended.stdout
    assert "pip install 'tfdist[gpu]'" in ended.stdout


def test_measures_between_tasks():
    command = [sys.executable, "-m", "tfdist.cli", "run", "-n", "2", "-m", "tfdist.cli", "doctor"]
    ended = subprocess.run(command, env=harness.environment(), capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "over 2 processes, 2 on this machine" in ended.stdout
    assert "reachable" in ended.stdout


def test_unusable_addresses_of_the_cluster_are_reported():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        free = f"127.0.0.1:{harness.free_ports(1)[0]}"
        cluster = {"worker": [used, free, "no-such-host.invalid:5"]}
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        ended = doctor("--timeout", "1", TF_CONFIG=config)
    assert ended.returncode == 1
    assert f"PROBLEM  address      worker 0 ({used}): this task's own port cannot be used" in ended.stdout
    assert f"worker 1 ({free}): reachable, and free" in ended.stdout
    assert "PROBLEM  address      worker 2 (no-such-host.invalid:5)" in ended.stdout
    assert "→" in ended.stdout


def test_secret_that_cannot_be_read_is_reported():
    config = json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}})
    ended = doctor(TF_CONFIG=config, TFDIST_SECRET="", TFDIST_SECRET_FILE="/no/such/file")
    assert ended.returncode == 1
    assert "PROBLEM  cluster      TFDIST_SECRET_FILE: cannot read /no/such/file" in ended.stdout


def test_reader_that_goes_away_is_no_error():
    command = f"{sys.executable} -m tfdist.cli doctor | head -1"
    ended = subprocess.run(
        command, shell=True, env=harness.environment(), capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.stdout.startswith("     ok  tfdist ")
    assert "BrokenPipe" not in ended.stderr


def test_invalid_tf_config_is_reported():
    ended = doctor(TF_CONFIG="{")
    assert ended.returncode == 1
    assert "TF_CONFIG is not JSON" in ended.stdout
