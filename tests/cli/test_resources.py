import ctypes
import os
import signal
import subprocess
import sys

import pytest

from tfdist.cli import resources


@pytest.mark.parametrize(
    ("cores", "size", "expected"),
    [
        ({0, 1, 2, 3}, 2, [[0, 1], [2, 3]]),
        ({7, 3, 5}, 2, [[3], [5]]),  # equal shares; the last core is left
        ({4}, 1, [[4]]),
        ({0, 1}, 3, [None, None, None]),
    ],
)
def test_cores_are_shared_out(monkeypatch, cores, size, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    assert [resources.cores_of(rank, size) for rank in range(size)] == expected


def test_unknown_affinity_assigns_no_cores(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert resources.cores_of(0, 1) is None


@pytest.fixture
def no_pools(monkeypatch):
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("size", "cores", "machine", "threads"),
    [(2, [0, 1, 2], 6, 3), (2, [0], 6, 1), (4, None, 2, 1), (2, None, 9, 4), (3, None, None, 1)],
)
def test_thread_pools_follow_cores(no_pools, monkeypatch, size, cores, machine, threads):
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    assert resources.thread_pools(size, cores) == {
        "TF_NUM_INTRAOP_THREADS": str(threads),
        "TF_NUM_INTEROP_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
    }


def test_thread_variables_set_by_the_user_are_kept(no_pools, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert set(resources.thread_pools(1, [0])) == {"TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"}


def test_gpus_are_dealt_out_in_turn(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-1a,5")
    gpus = [resources.gpu_of(rank)["CUDA_VISIBLE_DEVICES"] for rank in range(4)]
    assert gpus == ["3", "GPU-1a", "5", "3"]


def test_empty_visible_devices_are_kept(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert resources.gpu_of(0) == {}


LISTED = """GPU 0: NVIDIA A100 (UUID: GPU-1)
  MIG 1g.5gb Device 0: (UUID: MIG-1)
GPU 1: NVIDIA A100 (UUID: GPU-2)"""


@pytest.mark.parametrize(
    ("script", "expected"),
    [(f"echo '{LISTED}'", ["0", "1"]), ("echo 'No devices were found'", []), ("echo 'GPU 0: x'; exit 9", [])],
)
def test_gpus_listed_by_the_driver_are_assigned(monkeypatch, tmp_path, script, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert resources._nvidia_gpus() == expected
    assert resources.gpu_of(1) == ({"CUDA_VISIBLE_DEVICES": expected[1]} if expected else {})


def test_missing_driver_assigns_no_gpus(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert resources.gpu_of(0) == {}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
def test_at_its_start_a_process_takes_its_cores_and_dies_with_the_launcher():
    core = max(os.sched_getaffinity(0))
    program = (
        "import ctypes, os; number = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(number));"
        "print(os.sched_getaffinity(0), number.value)"
    )
    command = [sys.executable, "-S", "-c", program]
    ended = subprocess.run(
        command, preexec_fn=resources.at_start([core]), capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == f"{{{core}}} {int(signal.SIGKILL)}\n"
    death_signal = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(death_signal))
    assert death_signal.value != signal.SIGKILL, "the launcher's own"
