"""Finds which parameter servers are roots, and which are servers of a host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster.spec import TRAINING_JOBS, Task
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.protocol.programs import CHIEF


@dataclass(frozen=True)
class HierarchyRoles:
    """The tasks of a cluster by their role in the hierarchy. Tasks are given by number.

    Attributes:
        roots: root servers, in their order.
        workers: by host's server, the workers whose gradients it joins.
        members: tasks that push to the roots: servers of hosts, and workers without such a server.
    """

    roots: tuple[int, ...]
    workers: Mapping[int, tuple[int, ...]]
    members: frozenset[int]

    def server_of(self, task: int) -> int | None:
        """Returns the server of a worker's host.

        Args:
            task: number of the worker, which the cluster need not name.

        Returns:
            The server's number; None for a worker that pushes to the roots.
        """
        return next((server for server, workers in self.workers.items() if task in workers), None)

    @property
    def chief(self) -> int:
        """The member that the chief's gradients and values come from: the chief, or its host's server."""
        server = self.server_of(CHIEF)
        return CHIEF if server is None else server


def places_of(tasks: Sequence[Task], hierarchy: PerHost | None) -> HierarchyRoles:
    """Returns the roles of a cluster's tasks in the hierarchy.

    Args:
        tasks: tasks of the cluster, in the order of their numbers.
        hierarchy: option of `tfdist.ParameterServerStrategy` with the number of roots; None makes all servers roots.

    Raises:
        ClusterSpecError: no server is left beside the roots, two such servers are on one host, or one of them is on a
            host without workers.
    """
    servers = [number for number, task in enumerate(tasks) if task.job == "ps"]
    training = [number for number, task in enumerate(tasks) if task.job in TRAINING_JOBS]
    if hierarchy is None:
        return HierarchyRoles(tuple(servers), {}, frozenset(training))
    roots, rest = servers[: hierarchy.roots], servers[hierarchy.roots :]
    if not rest:
        raise ClusterSpecError(
            f"{hierarchy} needs at least one server for the workers of a host, besides {hierarchy.roots} root "
            f'server(s); the cluster has {len(servers)} task(s) of the job "ps". Add one on the host of some workers '
            "(`tfdist run --ps 2` on one machine), or leave servers=PerHost(…) out."
        )
    workers: dict[int, tuple[int, ...]] = {}
    for server in rest:
        host = _host(tasks[server])
        same = next((other for other in workers if _host(tasks[other]) == host), None)
        if same is not None:
            raise ClusterSpecError(
                f"{tasks[same]} and {tasks[server]} would both be the server of host {host}: leave out one "
                f"of them, or raise roots= in {hierarchy}, as the first servers of the job are roots"
            )
        workers[server] = tuple(number for number in training if _host(tasks[number]) == host)
        if not workers[server]:
            raise ClusterSpecError(
                f"{tasks[server]} would be the server of host {host}, where no worker is. Write the host of its "
                "address as in the workers' addresses, leave this server out, or raise roots= in "
                f"{hierarchy}, as the first servers of the job are roots."
            )
    joined = {number for numbers in workers.values() for number in numbers}
    return HierarchyRoles(tuple(roots), workers, frozenset({*workers, *(set(training) - joined)}))


def _host(task: Task) -> str:
    return task.address.rpartition(":")[0]
