"""The arguments of `ParameterServerStrategy`: which of them go together, and what they mean to servers and workers."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.cluster.spec import Cluster
from tfdist.compression.policy import Policy
from tfdist.errors import ClusterSpecError
from tfdist.parameter_server.hierarchy.places import places_of
from tfdist.parameter_server.options import published
from tfdist.parameter_server.options.per_host import PerHost
from tfdist.parameter_server.options.published import Options
from tfdist.parameter_server.options.pushes import ElasticAveraging, Hogwild, LocalSteps
from tfdist.parameter_server.options.staleness import AsItIs, DelayCompensated, StalenessPolicy
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronization
from tfdist.runtime.server_state import ServerOptions
from tfdist.strategies.servers.worker_options import WorkerOptions


@dataclass(frozen=True)
class Arguments:
    """As of `tfdist.ParameterServerStrategy`, which describes them; of compression the policies.

    Raises:
        TypeError: one is of another type.
        ValueError: one is not what it may be, or does not go with another one.
    """

    synchronization: Synchronization
    staleness_policy: StalenessPolicy
    prefetch: int
    data: str
    pushes: LocalSteps | ElasticAveraging | Hogwild | None
    compression: Policy | None
    pull_compression: Policy | None
    sparse: str
    snapshots: str | os.PathLike[str] | None
    snapshot_seconds: float
    replicas: int
    hierarchy: PerHost | None

    def __post_init__(self) -> None:
        self._check_types()
        if "://" in str(self.snapshots):
            raise ValueError(f"snapshots must be a folder of a file system; got {self.snapshots}")
        if self.prefetch not in (0, 1) or (
            self.prefetch and (self.synchronization.in_rounds or self.pushes is not None)
        ):
            raise ValueError(
                f"prefetch must be 0 or 1, and 0 with Synchronous() or pushes; got {self.prefetch} with "
                f"{self.synchronization} and {self.pushes}"
            )
        if self.data not in ("own", "shared"):
            raise ValueError(f'data must be "own" or "shared"; got {self.data!r}')
        if self.sparse not in ("exact", "lazy"):
            raise ValueError(f'sparse must be "exact" or "lazy"; got {self.sparse!r}')
        if self.replicas not in (1, 2):
            raise ValueError(f"replicas must be 1 or 2; got {self.replicas}")
        if self.pushes is not None:
            self._check_pushes()
        if self.pull_compression is not None and isinstance(self.staleness_policy, DelayCompensated):
            raise ValueError(
                f"pull_compression sends other parameters than the servers have: not with {self.staleness_policy}"
            )
        if self.hierarchy is not None:
            self._check_hierarchy(self.hierarchy)

    def _check_types(self) -> None:
        kinds: dict[str, tuple[Any, str]] = {
            "synchronization": (Synchronization, "Asynchronous(), BoundedStaleness(4), SoftSync(2) or Synchronous()"),
            "staleness_policy": (StalenessPolicy, "AsItIs(), Inverse() or DelayCompensated(0.1)"),
            "pushes": (
                LocalSteps | ElasticAveraging | Hogwild | None,
                "LocalSteps(8), ElasticAveraging() or Hogwild()",
            ),
            "hierarchy": (PerHost | None, "PerHost()"),
        }
        for name, (kind, examples) in kinds.items():
            given = getattr(self, name)
            if isinstance(given, type) or not isinstance(given, kind):
                raise TypeError(f"{name} must be one of tfdist.parameter_server, such as {examples}; got {given!r}")
        if not (isinstance(self.snapshot_seconds, (int, float)) and self.snapshot_seconds > 0):
            raise ValueError(f"snapshot_seconds must be a number of seconds above 0; got {self.snapshot_seconds!r}")

    def _check_pushes(self) -> None:
        pushes, mode, policy = self.pushes, self.synchronization, self.staleness_policy
        if self.data == "shared":
            raise ValueError(
                f'data="shared" counts the batches of each push of gradients, and {pushes} pushes what several steps '
                'have changed. Leave pushes= out; or use data="own", and give each worker its part of the data, for '
                "example dataset.shard(strategy.size, strategy.rank)."
            )
        if self.sparse == "lazy":
            raise ValueError(f'sparse="lazy" is about gradients, and {pushes} pushes none: use sparse="exact"')
        if self.pull_compression is not None:
            raise ValueError(f"pull_compression sends other parameters than the servers have: not with {pushes}")
        if isinstance(policy, DelayCompensated):
            raise ValueError(f"DelayCompensated corrects gradients, and {pushes} pushes none")
        if isinstance(pushes, ElasticAveraging) and mode.averages:
            raise ValueError(f"ElasticAveraging moves the servers by each push alone; got {mode}")
        if isinstance(pushes, Hogwild) and not (mode == Asynchronous() and policy == AsItIs()):
            raise ValueError(
                "with Hogwild() no server sees updates, to let them wait or to scale them: it needs Asynchronous() and "
                f"AsItIs(); got {mode} and {policy}"
            )
        if isinstance(pushes, Hogwild) and (self.compression is not None or self.replicas != 1):
            raise ValueError(
                f"Hogwild() sends no messages that could be compressed or copied; got compression={self.compression} "
                f"and replicas={self.replicas}"
            )

    def _check_hierarchy(self, hierarchy: PerHost) -> None:
        others = {
            "replicas": self.replicas > 1,
            "data": self.data == "shared",
            "pushes": self.pushes is not None,
            "compression": self.compression is not None,
            "pull_compression": self.pull_compression is not None,
            "staleness_policy": isinstance(self.staleness_policy, DelayCompensated),
        }
        if given := [f"{name}=" for name, is_given in others.items() if is_given]:
            raise ValueError(
                f"{hierarchy} joins gradients of a host's workers into one push; that does not go with what is given "
                f"as {', '.join(given)}. Leave that out, or leave hierarchy= out."
            )

    def check_cluster(self, cluster: Cluster | None) -> None:
        """Checks that a cluster can do what the arguments say.

        Args:
            cluster: of this process; None for a process alone.

        Raises:
            ClusterSpecError: it has no parameter servers, or not those of a hierarchy.
            ValueError: it has too few for copies.
        """
        servers = 0 if cluster is None else sum(task.job == "ps" for task in cluster.tasks)
        if cluster is not None and not servers and cluster.size > 1:
            raise ClusterSpecError(
                f'this cluster has {cluster.size} workers and no parameter server: add a job "ps" to TF_CONFIG, or '
                "start with `tfdist run --ps 1`"
            )
        if self.replicas == 2 and servers == 1:
            raise ValueError(
                "replicas=2 needs two parameter servers or more, as the copy of a server is on the next one; this "
                "cluster has 1"
            )
        if self.hierarchy is not None and cluster is not None and servers:
            places_of(cluster.tasks, self.hierarchy)

    def published(self) -> Options:
        """As other tasks see them."""
        return published.of(
            *(self.synchronization, self.staleness_policy, self.data, self.pushes),
            *(self.compression, self.pull_compression, self.sparse, self.replicas),
            None if self.snapshots is None else os.fspath(self.snapshots),
            *(self.snapshot_seconds, self.hierarchy),
        )

    def for_servers(self) -> ServerOptions:
        """What the servers do."""
        return ServerOptions(
            self.synchronization,
            self.staleness_policy,
            snapshots=None if self.snapshots is None else (Path(self.snapshots), self.snapshot_seconds),
            compression=self.compression,
            pull_compression=self.pull_compression,
            replicas=self.replicas,
            is_lazy=self.sparse == "lazy",
            is_hogwild=isinstance(self.pushes, Hogwild),
            hierarchy=self.hierarchy,
        )

    def for_workers(self, observes: bool = False) -> WorkerOptions:
        """What the workers do.

        Args:
            observes: whether this is an evaluator.
        """
        modes = [self.synchronization, *([] if self.hierarchy is None else [self.hierarchy.synchronization])]
        bounds = [None if mode.in_rounds else mode.lead() for mode in modes]
        return WorkerOptions(
            clips=not any(mode.averages for mode in modes),
            prefetch=self.prefetch,
            pushes=self.pushes,
            compression=self.compression,
            pull_compression=self.pull_compression,
            is_lazy=self.sparse == "lazy",
            shares_data=self.data == "shared",
            workers_wait=any(mode.lead() is not None for mode in modes),
            bound=min((bound for bound in bounds if bound is not None), default=None),
            hierarchy=self.hierarchy,
            has_copies=self.replicas > 1,
            observes=observes,
        )
