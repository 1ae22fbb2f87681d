"""Devices and processes; `tests/multiprocess/test_keras_distribution.py` has a job of several."""

import json
import os

import keras
import pytest
import tensorflow as tf

import tfdist
from tfdist import initialization
from tfdist.distribution import devices


def test_devices_of_a_process_alone_are_its_own():
    assert (devices.count(), devices.process()) == (1, 0)
    own = [f"cpu:{place}" for place in range(len(tf.config.list_logical_devices("CPU")))]
    assert devices.names() == devices.names("CPU") == own
    assert devices.names("gpu") == []


def test_devices_of_a_job_are_its_processes(processes, monkeypatch):
    processes(3)
    assert devices.names() == devices.names("CPU") == ["cpu:0", "cpu:1", "cpu:2"]
    assert devices.number_of() == 3
    assert devices.names("gpu") == devices.names("tpu") == []
    monkeypatch.setattr("tensorflow.config.get_visible_devices", lambda kind: ["a GPU"])
    assert devices.names() == ["gpu:0", "gpu:1", "gpu:2"]


def mesh(*names):
    return keras.distribution.DeviceMesh((len(names),), ["batch"], list(names))


def test_a_mesh_of_all_devices_in_any_order(processes):
    assert devices.of_mesh(mesh("cpu:0")) == ["CPU:0"]
    processes(2)
    assert devices.of_mesh(mesh("cpu:1", "CPU:0")) == ["CPU:0"]


def test_gpus_of_a_job_are_chosen_by_the_strategy(processes, monkeypatch):
    processes(2)
    monkeypatch.setattr("tensorflow.config.get_visible_devices", lambda kind: ["a GPU"])
    assert devices.of_mesh(mesh("gpu:0", "gpu:1")) is None


@pytest.mark.parametrize("names", [["cpu:0"], ["cpu:0", "cpu:0"], ["cpu:0", "gpu:1"], [f"cpu:{k}" for k in range(9)]])
def test_other_meshes_are_named(processes, names):
    processes(2)
    with pytest.raises(ValueError, match=r"is of the devices cpu:0.*this job of 2 processes has.* cpu:0, cpu:1\. Make"):
        devices.of_mesh(mesh(*names))


def test_a_process_alone_names_its_devices():
    with pytest.raises(ValueError, match=r"of the devices cpu:0, cpu:77; this process has cpu:0.*Make the mesh of all"):
        devices.of_mesh(mesh("cpu:0", "cpu:77"))


@pytest.mark.parametrize(
    ("addresses", "number", "workers"),
    [("a:1,b:2", 2, ["a:1", "b:2"]), ("a:1,b:2", None, ["a:1", "b:2"]), ("a:7", 3, ["a:7", "a:8", "a:9"])],
)
def test_addresses_describe_a_job(monkeypatch, processes, addresses, number, workers):
    processes(len(workers))
    devices.initialize(addresses, number, 1)
    described = json.loads(os.environ.pop("TF_CONFIG"))
    assert described == {"cluster": {"worker": workers}, "task": {"type": "worker", "index": 1}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("a:1,b:2", 3, 0), "num_processes=3, but job_addresses has 2 addresses"),
        (("a:1,b:2", 2, None), "process_id must be this process's rank, from 0 to 1; got None"),
        (("a:1,b:2", 2, 2), "from 0 to 1; got 2"),
        ((None, 7, None), r"initialize\(num_processes=7\): this process was started as rank 0 of a job of 1"),
        ((None, None, 5), r"initialize\(process_id=5\)"),
    ],
)
def test_contradictions_are_named(given, message):
    with pytest.raises(tfdist.ClusterSpecError, match=message):
        devices.initialize(*given)


def test_one_address_is_a_process_alone():
    devices.initialize("a:1", 1, 0)
    devices.initialize()
    assert devices.count() == 1


def test_a_process_in_use_cannot_enter_another_job():
    initialization.init()
    with pytest.raises(RuntimeError, match="Call initialize first"):
        devices.initialize("a:1,b:2", 2, 0)
