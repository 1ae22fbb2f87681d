import dataclasses
import json

import pytest

from tfdist.cluster import spec
from tfdist.errors import ClusterSpecError


def config(cluster, job="worker", index=0):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def test_ranks_begin_with_the_chief():
    jobs = {"worker": ["b:1", "c:1"], "chief": ["a:1"]}
    cluster = spec.from_tf_config(config(jobs, "worker", 1))
    assert [task.address for task in cluster.tasks] == ["a:1", "b:1", "c:1"]
    assert cluster.rank == 2
    assert cluster.size == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "{}",
        '{"task": {"type": "worker", "index": 0}}',
        '{"cluster": {}, "task": {"type": "chief", "index": 0}, "environment": "cloud"}',
        '{"cluster": {"worker": [], "ps": []}, "task": {"type": "worker", "index": 0}}',
    ],
)
def test_config_without_tasks_gives_no_cluster(text):
    assert spec.from_tf_config(text) is None


@pytest.mark.parametrize(
    "config",
    [
        {"clutser": {"worker": ["a:1", "b:1"]}},
        {"Cluster": {"worker": ["a:1"]}},
        {"cluster_spec": {"worker": ["a:1"]}},
        {"worker": ["a:1", "b:1"]},
        {"chief": "a:1"},
        {"hosts": ["a:1", "b:1"]},
        {"config": {"workers": ["a:1", "b:1"]}},
        {"cluster": {}, "worker": ["a:1"]},
    ],
)
def test_misplaced_cluster_key_raises(config):
    (key, *_) = [key for key in config if key != "cluster"]
    with pytest.raises(ClusterSpecError, match=f"no tasks under 'cluster', but '{key}', which looks like a cluster"):
        spec.from_tf_config(json.dumps({**config, "task": {"type": "worker", "index": 0}}))


@pytest.mark.parametrize(
    "more",
    [
        {"environment": "cloud", "model_dir": "gs://a/b"},
        {"job": {"job_name": "j", "args": ["--port", "a:1"], "region": "us"}},
        {"hosts": [], "rpc_layer": "grpc"},
    ],
)
def test_other_keys_are_ignored(more):
    task = {"type": "worker", "index": 0}
    assert spec.from_tf_config(json.dumps({**more, "task": task})) is None
    cluster = spec.from_tf_config(json.dumps({**more, "cluster": {"worker": ["a:1", "b:1"]}, "task": task}))
    assert cluster.size == 2


def test_sparse_cluster_key_of_kubeflow_is_read():
    sparse = {"worker": {"3": "c:1"}, "ps": ["a:1", "b:1"]}
    config = {"sparseCluster": sparse, "task": {"type": "worker", "index": 3}}
    cluster = spec.from_tf_config(json.dumps(config))
    assert cluster == spec.from_tf_config(json.dumps({"cluster": sparse, "task": config["task"]}))
    assert [str(task) for task in cluster.tasks] == ["worker 3 (c:1)", "ps 0 (a:1)", "ps 1 (b:1)"]


def test_parameter_servers_and_evaluators_have_no_rank():
    jobs = {"evaluator": ["e:1"], "ps": ["c:1", "d:1"], "worker": ["b:1"], "chief": ["a:1"]}
    for job, number, rank in (("chief", 0, 0), ("worker", 1, 1), ("ps", 2, None), ("evaluator", 4, None)):
        cluster = spec.from_tf_config(config(jobs, job, 0))
        assert (cluster.number, cluster.rank, cluster.size) == (number, rank, 2)
        assert [task.address for task in cluster.tasks] == ["a:1", "b:1", "c:1", "d:1", "e:1"]


def test_an_evaluator_need_not_be_listed():
    """As in TensorFlow."""
    listed = spec.from_tf_config(config({"worker": ["a:1"]}))
    cluster = spec.from_tf_config(config({"worker": ["a:1"]}, "evaluator", 0))
    assert (cluster.number, cluster.rank, cluster.size) == (None, None, 1)
    assert cluster.digest() == listed.digest()
    assert str(cluster.task) == "evaluator 0"


def test_clusters_with_parameter_servers_take_additional_workers():
    jobs = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    cluster = spec.from_tf_config(config(jobs, "worker", 7))
    assert cluster.is_elastic
    assert (cluster.number, cluster.rank, cluster.size) == (None, None, 2)
    with pytest.raises(ClusterSpecError, match="this process is worker 7, but the cluster has 1 task"):
        spec.from_tf_config(config({"chief": ["a:1"], "worker": ["b:1"]}, "worker", 7))


def test_cluster_without_training_tasks_raises():
    with pytest.raises(ClusterSpecError, match="must name a chief or a worker, which train; got"):
        spec.from_tf_config(config({"ps": ["a:1"]}, "ps", 0))


def test_addresses_may_be_keyed_by_index():
    cluster = spec.from_tf_config(config({"worker": {"1": "b:1", "0": "a:1"}}))
    assert [task.address for task in cluster.tasks] == ["a:1", "b:1"]


def test_index_that_is_given_twice_raises():
    with pytest.raises(ClusterSpecError, match="the job 'worker' must give each index once"):
        spec.from_tf_config(config({"worker": {"0": "a:1", "00": "a:2"}}))


def test_digest_tells_clusters_apart():
    digest, same, other = (
        spec.from_tf_config(config({"worker": addresses}, index=index)).digest()
        for addresses, index in ((["a:1", "b:1"], 0), (["a:1", "b:1"], 1), (["a:1", "b:2"], 0))
    )
    assert digest == same != other


@pytest.mark.parametrize(
    "address", ["a", "a:", ":1", "a:b", "a:0", "a:70000", "a..b:1", "http://a:1", "a/b:1", f"{'a' * 64}:1", 5, None]
)
def test_bad_address(address):
    with pytest.raises(ClusterSpecError, match="host:port"):
        spec.from_tf_config(config({"worker": [address]}))


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"type": "worker"},
        {"index": 0},
        {"type": 1, "index": 0},
        {"type": "worker", "index": "zero"},
        {"type": "worker", "index": True},
        {"type": "worker", "index": "-1"},
    ],
)
def test_invalid_task_raises(task):
    with pytest.raises(ClusterSpecError, match="TF_CONFIG's task must hold"):
        spec.from_tf_config(json.dumps({"cluster": {"worker": ["a:1"]}, "task": task}))


def test_master_is_the_chief():
    """So it is called by SageMaker and by older TFJobs."""
    jobs = {"worker": ["b:1", "c:1"], "master": ["a:1"]}
    cluster = spec.from_tf_config(config(jobs, "master", 0))
    assert cluster.rank == 0
    assert [str(task) for task in cluster.tasks] == ["master 0 (a:1)", "worker 0 (b:1)", "worker 1 (c:1)"]
    with pytest.raises(ClusterSpecError, match=r"one chief; got 2: chief 0 \(b:1\), master 0 \(a:1\)"):
        spec.from_tf_config(config({"master": ["a:1"], "chief": ["b:1"]}, "master"))


def test_jobs_without_tasks_are_ignored():
    """A TFJob with `replicas: 0`."""
    jobs = {"chief": [], "ps": [], "evaluator": {}, "worker": ["a:1", "b:1"]}
    assert spec.from_tf_config(config(jobs, "worker", 1)).rank == 1


def test_index_as_a_string():
    assert spec.from_tf_config(config({"worker": ["a:1", "b:1"]}, index="1")).rank == 1


def test_indices_of_tasks_may_have_gaps():
    jobs = {"worker": {"5": "b:1", "0": "a:1", "10": "c:1"}}
    cluster = spec.from_tf_config(config(jobs, index=10))
    assert cluster.rank == 2
    assert [task.index for task in cluster.tasks] == [0, 5, 10]
    with pytest.raises(ClusterSpecError, match=r"this process is worker 1, but .* with the indices 0, 5, 10, of the"):
        spec.from_tf_config(config(jobs, index=1))


def test_lone_worker_with_nonzero_index_raises():
    with pytest.raises(ClusterSpecError, match="names no other task"):
        spec.from_tf_config(config({"worker": {"3": "a:1"}}, index=3))


def test_protocol_prefix_of_addresses_is_ignored():
    bare = spec.from_tf_config(config({"worker": ["a:1", "b:1"]}))
    assert spec.from_tf_config(config({"worker": ["grpc://a:1", "grpc://b:1"]})) == bare


@pytest.mark.parametrize("addresses", ["a:1", 5, {"first": "a:1"}])
def test_addresses_of_a_job_must_be_a_list(addresses):
    with pytest.raises(ClusterSpecError, match="the job 'worker' must"):
        spec.from_tf_config(config({"worker": addresses}))


def test_two_chiefs():
    with pytest.raises(ClusterSpecError, match="one chief; got 2"):
        spec.from_tf_config(config({"chief": ["a:1", "b:1"]}, "chief"))


class Resolver:
    def __init__(self, jobs, task_type, task_id):
        self.jobs, self.task_type, self.task_id = jobs, task_type, task_id

    def cluster_spec(self):
        return self

    def as_dict(self):
        return self.jobs


def test_cluster_is_read_from_a_resolver():
    assert spec.from_resolver(Resolver({}, None, None)) is None
    assert spec.from_resolver(Resolver({"worker": ["a:1", "b:1"]}, "worker", 1)).rank == 1
    with pytest.raises(ClusterSpecError, match=r"Resolver gives a cluster .* but not this process's own task"):
        spec.from_resolver(Resolver({"worker": ["a:1"]}, None, None))


def test_split_address_handles_ipv6():
    assert spec.split_address("[::1]:80") == ("::1", 80)
    assert spec.split_address("host:80") == ("host", 80)


def test_elastic_and_fixed_clusters_have_different_digests():
    fixed = spec.from_jobs({"worker": ["a:1", "b:1"]}, "worker", 0, "test")
    elastic = dataclasses.replace(fixed, has_elastic_workers=True)
    assert (fixed.is_elastic, elastic.is_elastic) == (False, True)
    assert fixed.digest() != elastic.digest()
