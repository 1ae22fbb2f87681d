"""The arguments of `ParameterServerStrategy`: which of them go together, and what they mean to servers and workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfdist.cluster.spec import Cluster
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server.hierarchy.places import places_of
from tfdist.parameter_server.options import combinations, published
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.published import Options
from tfdist.parameter_server.options.pushes import ElasticAveraging, Gradients, Hogwild, LocalSteps, policy_of
from tfdist.parameter_server.options.servers import Servers
from tfdist.parameter_server.options.synchronization import Synchronization
from tfdist.runtime.server_state import ServerOptions
from tfdist.strategies.servers.worker_options import WorkerOptions


@dataclass(frozen=True)
class Arguments:
    """The arguments of `tfdist.ParameterServerStrategy`, which describes them.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or excludes another one.
    """

    synchronization: Synchronization
    pushes: Gradients | LocalSteps | ElasticAveraging | Hogwild
    servers: Servers | PerHost
    data: str

    def __post_init__(self) -> None:
        self._check_types()
        if self.data not in ("own", "shared"):
            raise ValueError(f'data must be "own" or "shared"; got {self.data!r}')
        combinations.check(self.synchronization, self.pushes, self.servers, self.data)

    def _check_types(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "synchronization": (Synchronization, "Asynchronous(), BoundedStaleness(4), SoftSync(2) or Synchronous()"),
            "pushes": (
                Gradients | LocalSteps | ElasticAveraging | Hogwild,
                "Gradients(), LocalSteps(8), ElasticAveraging() or Hogwild()",
            ),
            "servers": (Servers | PerHost, "Servers() or PerHost()"),
        }
        for name, (kind, examples) in kinds.items():
            given = getattr(self, name)
            if isinstance(given, type) or not isinstance(given, kind):
                raise TypeError(f"{name} must be one of tfdist.parameter_server, such as {examples}; got {given!r}")

    def check_cluster(self, cluster: Cluster | None) -> None:
        """Checks that a cluster has the servers that the arguments need.

        Args:
            cluster: cluster of this process; None for a process alone.

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
        if isinstance(self.servers, Servers) and self.servers.copies and servers == 1:
            raise ValueError(
                "Servers(copies=1) needs two parameter servers or more, as the copy of a server is on the next one; "
                "this cluster has 1"
            )
        if isinstance(self.servers, PerHost) and cluster is not None and servers:
            places_of(cluster.tasks, self.servers)

    def published(self) -> Options:
        """Returns the arguments as other tasks see them."""
        return published.of(self.synchronization, self.pushes, self.servers, self.data)

    def for_servers(self) -> ServerOptions:
        """Returns the options of servers."""
        return ServerOptions(self.synchronization, self.pushes, self.servers)

    def for_workers(self, observes: bool = False) -> WorkerOptions:
        """Returns the options of workers.

        Args:
            observes: whether this task is an evaluator.
        """
        pushes, hierarchy = self.pushes, self.servers if isinstance(self.servers, PerHost) else None
        modes = [self.synchronization, *([] if hierarchy is None else [hierarchy.synchronization])]
        bounds = [None if mode.in_rounds else mode.lead() for mode in modes]
        of_gradients = pushes if isinstance(pushes, Gradients) else Gradients()
        return WorkerOptions(
            clips=not any(mode.averages for mode in modes),
            prefetch=of_gradients.prefetch,
            pushes=None if isinstance(pushes, Gradients) else pushes,
            compression=None if isinstance(pushes, Hogwild) else policy_of(pushes.compression),
            pull_compression=policy_of(of_gradients.parameters),
            is_lazy=of_gradients.sparse == "lazy",
            shares_data=self.data == "shared",
            workers_wait=any(mode.lead() is not None for mode in modes),
            bound=min((bound for bound in bounds if bound is not None), default=None),
            hierarchy=hierarchy,
            has_copies=isinstance(self.servers, Servers) and self.servers.copies > 0,
            observes=observes,
        )
