"""What the arguments mean to servers, to workers (`test_worker_options.py`), and to other tasks."""

from pathlib import Path

import pytest

from tfdist.cluster.spec import Cluster, Task
from tfdist.compression import Int8
from tfdist.compression.policy import as_policy
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server import (
    Asynchronous,
    Gradients,
    Hogwild,
    LocalSteps,
    PerHost,
    Servers,
    SoftSync,
    Synchronous,
)
from tfdist.strategies.servers.server_arguments import Arguments

DEFAULTS = {"synchronization": Asynchronous(), "pushes": Gradients(), "servers": Servers(), "data": "own"}


def arguments(**given):
    return Arguments(**{**DEFAULTS, **given})


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"synchronization": "synchronous"}, TypeError, r"Synchronous\(\); got 'synchronous'"),
        ({"synchronization": Synchronous}, TypeError, "got <class .*Synchronous'>"),
        ({"pushes": "local"}, TypeError, r"such as Gradients\(\), .*; got 'local'"),
        ({"pushes": None}, TypeError, r"such as Gradients\(\), .*; got None"),
        ({"servers": True}, TypeError, r"such as Servers\(\) or PerHost\(\); got True"),
        ({"data": "all"}, ValueError, "got 'all'"),
        ({"data": "shared", "pushes": LocalSteps(2)}, ValueError, "does not go with"),
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
        ({"servers": Servers(copies=1)}, 1, ValueError, "two parameter servers or more"),
        ({"servers": PerHost()}, 1, ClusterSpecError, "needs servers of hosts"),
    ],
)
def test_clusters_that_cannot_do_it(given, servers, error, message):
    with pytest.raises(error, match=message):
        arguments(**given).check_cluster(cluster_of(servers))
    arguments(**given).check_cluster(None)


def test_what_servers_and_others_get():
    given = {"servers": Servers(snapshots=Path("a"), snapshot_seconds=5.0), "pushes": Hogwild()}
    servers = arguments(**given).for_servers()
    assert (servers.snapshots, servers.pushes, servers.hierarchy) == ((Path("a"), 5.0), Hogwild(), None)
    published = arguments(**given).published()
    assert (published.pushes, published.servers, published.snapshots) == ("Hogwild()", "Servers()", "a")
    hierarchy = PerHost(SoftSync(2), 3)
    assert arguments(servers=hierarchy).for_servers().hierarchy == hierarchy
    workers = arguments(pushes=LocalSteps(3, Int8())).for_workers()
    assert repr(workers.compression) == repr(as_policy(Int8()))
