"""Whether a cluster has the parameter servers that a strategy's arguments need."""

from __future__ import annotations

from tfdist.cluster.spec import Cluster
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server.hierarchy.places import places_of
from tfdist.parameter_server.options.arguments import Arguments


def check_cluster(arguments: Arguments, cluster: Cluster | None) -> None:
    """Checks that a cluster can do what the arguments of a strategy ask for.

    Args:
        arguments: the strategy's arguments.
        cluster: this process's cluster; None for a process alone.

    Raises:
        ClusterSpecError: the cluster has no parameter servers, or not those of a hierarchy.
        ValueError: the cluster has too few servers for copies.
    """
    servers = 0 if cluster is None else sum(task.job == "ps" for task in cluster.tasks)
    if cluster is not None and not servers and cluster.size > 1:
        raise ClusterSpecError(
            f'this cluster has {cluster.size} workers and no parameter server: add a job "ps" to TF_CONFIG, or '
            "start with `tfdist run --ps 1`"
        )
    if arguments.has_copies and servers == 1:
        raise ValueError(
            "Servers(copies=1) needs two parameter servers or more, as the copy of a server is on the next one; "
            "this cluster has 1"
        )
    if arguments.hierarchy is not None and cluster is not None and servers:
        places_of(cluster.tasks, arguments.hierarchy)
