import pytest

from tfdist.cluster.spec import Cluster, Task
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server import PerHost, Servers
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.strategies.servers.cluster_check import check_cluster


def cluster_of(servers, workers=2):
    tasks = [Task("worker", index, f"a:{index + 1}") for index in range(workers)]
    tasks += [Task("ps", index, f"b:{index + 1}") for index in range(servers)]
    return Cluster(tuple(tasks), tasks[0])


@pytest.mark.parametrize(
    ("given", "servers", "error", "message"),
    [
        ({}, 0, ClusterSpecError, "2 workers and no parameter server"),
        ({"servers": Servers(copies=1)}, 1, ValueError, "two parameter servers or more"),
        ({"servers": PerHost()}, 1, ClusterSpecError, "needs at least one server for the workers of a host"),
    ],
)
def test_clusters_without_the_servers_that_are_needed_are_errors(given, servers, error, message):
    with pytest.raises(error, match=message):
        check_cluster(Arguments(**given), cluster_of(servers))
    check_cluster(Arguments(**given), None)


@pytest.mark.parametrize(("given", "servers"), [({}, 1), ({"servers": Servers(copies=1)}, 2)])
def test_clusters_with_enough_servers_are_accepted(given, servers):
    check_cluster(Arguments(**given), cluster_of(servers))
