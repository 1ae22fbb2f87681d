"""Which arguments go together, and what they mean; `test_worker_options.py` has what workers get of them."""

from pathlib import Path

import pytest

from tfdist.cluster.spec import Cluster, Task
from tfdist.compression import Int8
from tfdist.compression.policy import as_policy
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server import (
    AsItIs,
    Asynchronous,
    BoundedStaleness,
    DelayCompensated,
    ElasticAveraging,
    Hogwild,
    LocalSteps,
    PerHost,
    SoftSync,
    Synchronous,
)
from tfdist.strategies.servers.server_arguments import Arguments

DEFAULTS = {
    "synchronization": Asynchronous(),
    "staleness_policy": AsItIs(),
    "prefetch": 0,
    "data": "own",
    "pushes": None,
    "compression": None,
    "pull_compression": None,
    "sparse": "exact",
    "snapshots": None,
    "snapshot_seconds": 60.0,
    "replicas": 1,
    "hierarchy": None,
}


def arguments(**given):
    return Arguments(**{**DEFAULTS, **given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"snapshots": "gs://bucket"}, "a folder of a file system; got gs://bucket"),
        ({"prefetch": 2}, "prefetch must be 0 or 1"),
        ({"prefetch": 1, "synchronization": Synchronous()}, "0 with Synchronous"),
        ({"data": "all"}, "got 'all'"),
        ({"replicas": 3}, "replicas must be 1 or 2; got 3"),
        ({"pushes": LocalSteps(2), "data": "shared"}, "counts the batches of each push"),
        ({"pushes": LocalSteps(2), "pull_compression": as_policy(Int8())}, "not with LocalSteps"),
        ({"pushes": LocalSteps(2), "staleness_policy": DelayCompensated()}, "pushes none"),
        ({"pushes": ElasticAveraging(), "synchronization": SoftSync(1)}, "by each push alone; got SoftSync"),
        ({"pushes": Hogwild(), "synchronization": BoundedStaleness(2)}, "no server sees updates"),
        ({"pushes": Hogwild(), "compression": as_policy(Int8())}, "compressed or copied"),
        ({"hierarchy": PerHost(), "data": "shared", "replicas": 2}, "given as replicas=, data=. Leave that out"),
    ],
)
def test_what_does_not_go_together(given, message):
    with pytest.raises(ValueError, match=message):
        arguments(**given)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"synchronization": "synchronous"}, TypeError, r"Synchronous\(\); got 'synchronous'"),
        ({"synchronization": Synchronous}, TypeError, "got <class .*Synchronous'>"),
        ({"staleness_policy": 0.5}, TypeError, r"such as AsItIs\(\), .*; got 0.5"),
        ({"pushes": "local"}, TypeError, r"such as LocalSteps\(8\), .*; got 'local'"),
        ({"hierarchy": True}, TypeError, r"such as PerHost\(\); got True"),
        ({"snapshot_seconds": "60"}, ValueError, "a number of seconds above 0; got '60'"),
    ],
)
def test_what_is_something_else(given, error, message):
    with pytest.raises(error, match=message):
        arguments(**given)


def cluster_of(servers, workers=2):
    tasks = [Task("worker", index, f"a:{index + 1}") for index in range(workers)]
    tasks += [Task("ps", index, f"b:{index + 1}") for index in range(servers)]
    return Cluster(tuple(tasks), tasks[0])


@pytest.mark.parametrize(
    ("given", "servers", "error", "message"),
    [
        ({}, 0, ClusterSpecError, "2 workers and no parameter server"),
        ({"replicas": 2}, 1, ValueError, "two parameter servers or more"),
        ({"hierarchy": PerHost()}, 1, ClusterSpecError, "needs servers of hosts"),
    ],
)
def test_clusters_that_cannot_do_it(given, servers, error, message):
    with pytest.raises(error, match=message):
        arguments(**given).check_cluster(cluster_of(servers))
    arguments(**given).check_cluster(None)


def test_what_servers_and_others_get():
    given = {"snapshots": Path("a"), "snapshot_seconds": 5.0, "pushes": Hogwild()}
    servers = arguments(**given).for_servers()
    assert (servers.snapshots, servers.is_hogwild, servers.is_lazy) == ((Path("a"), 5.0), True, False)
    published = arguments(**given).published()
    assert (published.pushes, published.snapshots, published.snapshot_seconds) == ("Hogwild()", "a", 5.0)
    lazy = arguments(sparse="lazy", hierarchy=PerHost(SoftSync(2), 3)).for_servers()
    assert (lazy.is_lazy, lazy.is_hogwild, lazy.hierarchy) == (True, False, PerHost(SoftSync(2), 3))
