"""What a strategy tells of its cluster to scripts that ask, as TensorFlow's tutorial for several workers does."""

import json

import pytest

from tfdist.cluster import discovery, spec
from tfdist.errors import ClusterSpecError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    sizes = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE")
    for name in ("TF_CONFIG", "RANK", *sizes):
        monkeypatch.delenv(name, raising=False)


def resolver(jobs, job, index):
    config = {"cluster": jobs, "task": {"type": job, "index": index}}
    return discovery.resolver_of(spec.from_tf_config(json.dumps(config)))


def test_resolver_of_tf_config():
    resolved = resolver({"master": ["grpc://a:1"], "worker": {"0": "b:1", "3": "c:1"}, "ps": []}, "worker", "3")
    assert (resolved.task_type, resolved.task_id, resolved.rpc_layer) == ("worker", 3, "grpc")
    assert resolved.cluster_spec().as_dict() == {"master": ["a:1"], "worker": {0: "b:1", 3: "c:1"}}
    assert resolved.master("worker", 3) == "grpc://c:1"
    assert spec.from_resolver(resolved) == spec.from_resolver(resolver(resolved.cluster_spec().as_dict(), "worker", 3))


def test_invalid_resolver_raises_type_error():
    with pytest.raises(TypeError, match=r"cluster_resolver must be a .*; got 'worker'"):
        discovery.discover("worker")


def test_variables_of_torchrun_are_told_once_not_to_be_read(monkeypatch, caplog):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert discovery.discover(None) is None
    assert not caplog.records, "another program may use this name"
    monkeypatch.setenv("RANK", "0")
    for _ in range(2):
        assert discovery.discover(None) is None
    (record,) = caplog.records
    assert "RANK=0 and WORLD_SIZE=2 are set, as by torchrun" in record.getMessage()
    assert "`tfdist run -n 2`" in record.getMessage()


def test_resolver_of_an_evaluator():
    resolved = resolver({"worker": ["a:1"], "evaluator": ["b:1"]}, "evaluator", 0)
    assert (resolved.task_type, resolved.task_id) == ("evaluator", 0)
    assert resolved.cluster_spec().as_dict() == {"worker": ["a:1"], "evaluator": ["b:1"]}


def test_resolver_of_a_process_alone():
    resolved = discovery.resolver_of(discovery.discover(None))
    assert (resolved.task_type, resolved.task_id) == (None, None)
    assert not resolved.cluster_spec()


def test_strategy_exposes_its_cluster_resolver():
    import tfdist

    strategy = tfdist.AllReduceStrategy()
    assert strategy.cluster_resolver.task_type is None
    given = discovery.resolver_of(None)
    assert tfdist.AllReduceStrategy(cluster_resolver=given).cluster_resolver is given


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID"])
def test_non_numeric_slurm_variable_raises(monkeypatch, name):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv(name, "two")
    with pytest.raises(ClusterSpecError, match=f"{name} must be a number, as srun sets it; got 'two'"):
        discovery.discover(None)


@pytest.mark.parametrize("name", ["SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"])
def test_missing_slurm_variable_raises(monkeypatch, name):
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NODELIST": "a", "SLURM_STEP_TASKS_PER_NODE": "2"}
    for given, value in {**step, "SLURM_STEP_NUM_TASKS": "2"}.items():
        monkeypatch.setenv(given, value)
    monkeypatch.delenv(name)
    with pytest.raises(ClusterSpecError, match=f"SLURM_STEP_NUM_TASKS is 2, but {name} is not set, as srun sets it"):
        discovery.discover(None)
