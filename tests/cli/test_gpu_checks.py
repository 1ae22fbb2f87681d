"""Tests of the GPU checks without GPUs: the CPU stands in for the devices, and functions for `nvidia-smi`."""

import subprocess
import types

import numpy as np
import pytest
import tensorflow as tf

from tfdist.cli import gpu_checks
from tfdist.cli.findings import Severity

CUDA = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"}


def driver(monkeypatch, stdout, stderr="", peers=""):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 0, peers if "topo" in command else stdout, stderr)

    monkeypatch.setattr(gpu_checks.shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    monkeypatch.setattr(gpu_checks.subprocess, "run", run)


ALL_REACH = (
    " \t\x1b[4mGPU0\tGPU1\t\x1b[0m\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
)


def test_the_driver_lists_gpus(monkeypatch):
    driver(monkeypatch, "0, A card, 81559 MiB, 580.1\n1, Another, 40960 MiB, 580.1\n", peers=ALL_REACH)
    findings = list(gpu_checks.listed())
    assert [finding.subject for finding in findings] == ["GPU 0", "GPU 1", "peer access", "GPU libraries"]
    assert findings[1].text == "Another, 40960 MiB, driver 580.1"
    assert findings[2].level is Severity.OK


@pytest.mark.parametrize(
    ("peers", "text"),
    [
        (ALL_REACH.replace("GPU1\tOK", "GPU1\tCNS"), "not 1 of 0 (CNS). Copies between them pass through the host"),
        ("topo is not supported here\n", "the driver does not say"),
        (ALL_REACH.replace("GPU1\tOK", "GPU1\t?"), "the driver does not say"),
    ],
)
def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch, peers, text):
    driver(monkeypatch, "0, A card, 8 MiB, 580.1\n1, Another, 8 MiB, 580.1\n", peers=peers)
    *_, finding, _ = gpu_checks.listed()
    assert (finding.level, finding.subject) == (Severity.NOTE, "peer access")
    assert text in finding.text


@pytest.mark.parametrize(
    ("packages", "level", "text"),
    [
        (["tensorflow", "nvidia-nccl-cu12", "nvidia-cudnn-cu12"], Severity.OK, "nccl 1.2, cudnn 1.2"),
        (["tensorflow"], Severity.NOTE, "none in this environment"),
        (["tensorflow-cpu", "nvidia-nccl-cu12"], Severity.NOTE, "tensorflow-cpu does not use GPUs"),
    ],
)
def test_libraries_for_gpus_are_listed(monkeypatch, packages, level, text):
    driver(monkeypatch, "0, A card, 8 MiB, 580.1\n")
    made = [types.SimpleNamespace(metadata={"Name": package}, version="1.2") for package in packages]
    monkeypatch.setattr(gpu_checks.importlib.metadata, "distributions", lambda: made)
    *_, finding = gpu_checks.listed()
    assert (finding.level, finding.subject) == (level, "GPU libraries")
    assert text in finding.text


def test_driver_without_gpus_gives_a_note(monkeypatch):
    driver(monkeypatch, "", "No devices were found\n")
    (finding,) = gpu_checks.listed()
    assert (finding.level, finding.text) == (Severity.NOTE, "nvidia-smi finds no GPU: No devices were found")


def test_missing_driver_lists_no_gpus(monkeypatch):
    monkeypatch.setattr(gpu_checks.shutil, "which", lambda name: None)
    assert not list(gpu_checks.listed())


@pytest.mark.parametrize(
    ("build", "text", "advice"),
    [
        ({"is_cuda_build": False}, "built without support for GPUs", "tfdist[gpu]"),
        (CUDA, "built for cuda 12.5.1, cudnn 9, finds no GPU", "which library TensorFlow lacks"),
    ],
)
def test_tensorflow_without_gpu_access_is_a_problem(monkeypatch, build, text, advice):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: build)
    (finding,) = gpu_checks.try_all()
    assert finding.level is Severity.PROBLEM
    assert text in finding.text
    assert advice in finding.advice


@pytest.fixture
def gpu(monkeypatch):
    """A GPU in whose place the CPU computes."""
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: CUDA)
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [types.SimpleNamespace(device_type="GPU")]
    )
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", lambda gpu, growth: None)
    trained, copied = gpu_checks.trained, gpu_checks.copied
    monkeypatch.setattr(gpu_checks, "trained", lambda device: trained("CPU:0"))
    monkeypatch.setattr(gpu_checks, "copied", lambda device: copied("CPU:0"))
    monkeypatch.setattr(gpu_checks, "_MEBIBYTES", 1)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(True)


@pytest.mark.usefixtures("gpu")
def test_working_gpu_passes_all_checks():
    findings = list(gpu_checks.try_all())
    assert [finding.level for finding in findings] == [Severity.OK] * 3
    assert "finds 1" in findings[0].text
    assert "sums are right" in findings[1].text
    assert findings[2].text == "after 5 steps, weights differ from the CPU's by 0"


@pytest.mark.usefixtures("gpu")
def test_weights_differing_from_the_cpus_are_a_problem(monkeypatch):
    monkeypatch.setattr(gpu_checks, "trained", lambda device: np.full(3, 1.0 if "GPU" in device else 1.1))
    *_, finding = gpu_checks.try_all()
    assert (finding.level, finding.subject) == (Severity.PROBLEM, "GPU:0")
    assert "differ from the CPU's by 0.1" in finding.text


@pytest.mark.usefixtures("gpu")
def test_error_on_the_gpu_is_a_problem(monkeypatch):
    def full(device):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory\nand more")

    monkeypatch.setattr(gpu_checks, "copied", full)
    *_, finding = gpu_checks.try_all()
    assert (finding.level, finding.text) == (Severity.PROBLEM, "cannot compute: out of memory")


@pytest.fixture
def two_gpus(gpu, monkeypatch):
    """Two GPUs in whose place CPUs compute."""
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: [types.SimpleNamespace(device_type="GPU")] * 2
    )
    summed = gpu_checks.summed
    monkeypatch.setattr(gpu_checks, "summed", lambda devices: summed(["CPU:0", "CPU:1"]))


@pytest.mark.usefixtures("two_gpus")
def test_gpus_of_a_process_sum_together():
    *_, finding = gpu_checks.try_all()
    assert (finding.level, finding.subject) == (Severity.OK, "2 GPUs")
    assert "sums are right" in finding.text


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_cannot_sum_together_are_a_problem(monkeypatch):
    def failing(devices):
        raise tf.errors.InternalError(None, None, "NCCL: unhandled system error\nand more")

    monkeypatch.setattr(gpu_checks, "summed", failing)
    *_, finding = gpu_checks.try_all()
    assert (finding.level, finding.text) == (Severity.PROBLEM, "cannot sum together: NCCL: unhandled system error")
