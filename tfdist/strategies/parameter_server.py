"""`ParameterServerStrategy`: asynchronous training on parameter servers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal

from tfdist.strategies import require_tensorflow

require_tensorflow()

import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.cluster.spec import Cluster  # noqa: E402
from tfdist.compression import policy  # noqa: E402
from tfdist.compression.policy import Choice, Policy, Schedule  # noqa: E402
from tfdist.errors import ClusterSpecError  # noqa: E402
from tfdist.parameter_server import options  # noqa: E402
from tfdist.parameter_server.pushes import ElasticAveraging, LocalSteps  # noqa: E402
from tfdist.parameter_server.staleness import AsItIs, DelayCompensated, StalenessPolicy  # noqa: E402
from tfdist.parameter_server.synchronization import Asynchronous, Synchronization  # noqa: E402
from tfdist.runtime import agreement, job, serving  # noqa: E402
from tfdist.runtime.server_state import ServerOptions  # noqa: E402
from tfdist.strategies import keras_seams  # noqa: E402
from tfdist.strategies.server_extended import OneDevice, ServerExtended  # noqa: E402
from tfdist.strategies.worker_options import WorkerOptions  # noqa: E402


class ParameterServerStrategy(tf.distribute.Strategy):
    """Trains Keras models with variables and optimizers on parameter servers.

    Every task runs the same script. On a ``ps`` task this serves until the job is over, and then ends the process; the
    chief and the workers train, each on its own data, at its own pace. An evaluator, and a process without parameter
    servers, train or evaluate as usual.

    Args:
        cluster_resolver: describes the cluster; by default TF_CONFIG does.
        synchronization: when updates are applied (`tfdist.parameter_server`).
        staleness_policy: what late gradients are worth (`tfdist.parameter_server`).
        prefetch: 1 to compute the next step while the last one is on its way; its gradient is then of parameters that
            lack the worker's own last update, which counts as staleness. Not with `Synchronous`, nor with ``pushes``.
        data: "own" to train on all that `fit` is given; "shared" to deal the batches of each epoch out to the workers,
            so that every sample of an epoch counts once, whichever worker dies. All workers must then give `fit` the
            same data. Not with ``pushes``.
        pushes: `tfdist.parameter_server.LocalSteps` or `ElasticAveraging`: each worker's own optimizer makes its
            updates, and what they have changed is pushed. None for gradients, of which the servers make updates.
        compression: a method, schedule or policy of `tfdist.compression`, for what is pushed of dense gradients. What
            an encoding lacks is added to the worker's next one. None for no compression.
        pull_compression: likewise, for the parameters that come back: the servers send what they differ by from those
            that the worker has, and keep these for each worker. Not with ``pushes``, nor `DelayCompensated`.
        sparse: "exact" for the optimizer's own mathematics; "lazy" to update, of a variable with a sparse gradient (an
            `Embedding`) and of its slots, only the rows that the gradient names. Workers get the rows that are newer,
            where other rows keep their values. Not with ``pushes``.
        snapshots: folder in which the servers write snapshots, and from which they go on, also a job with another
            number of servers; the same for all servers. None for no snapshots.
        snapshot_seconds: between two snapshots.
        replicas: 2 to keep a copy of each server's state on the next server, which takes over if the first one dies; no
            update that a worker has been told of is lost then. Needs two servers or more.
        timeouts: how long to wait for other tasks.

    Raises:
        TfdistError: the chief or a server cannot be reached, or another task has other arguments.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        synchronization: Synchronization = Asynchronous(),  # noqa: B008
        staleness_policy: StalenessPolicy = AsItIs(),  # noqa: B008
        prefetch: int = 0,
        data: Literal["own", "shared"] = "own",
        pushes: LocalSteps | ElasticAveraging | None = None,
        compression: Choice | Schedule | Policy = None,
        pull_compression: Choice | Schedule | Policy = None,
        sparse: Literal["exact", "lazy"] = "exact",
        snapshots: str | os.PathLike[str] | None = None,
        snapshot_seconds: float = 60.0,
        replicas: int = 1,
        timeouts: Timeouts | None = None,
    ) -> None:
        if "://" in str(snapshots):
            raise ValueError(f"snapshots must be a folder of a file system; got {snapshots}")
        if prefetch not in (0, 1) or (prefetch and (synchronization.in_rounds or pushes is not None)):
            raise ValueError(
                f"prefetch must be 0 or 1, and 0 with Synchronous() or pushes; got {prefetch} with {synchronization} "
                f"and {pushes}"
            )
        if data not in ("own", "shared"):
            raise ValueError(f'data must be "own" or "shared"; got {data!r}')
        if data == "shared" and pushes is not None:
            raise ValueError(
                f'data="shared" counts the batches of each push of gradients, and {pushes} pushes what several steps '
                'have changed. Leave pushes= out; or use data="own", and give each worker its part of the data, for '
                "example dataset.shard(count, index)."
            )
        if sparse not in ("exact", "lazy") or (sparse == "lazy" and pushes is not None):
            raise ValueError(f'sparse must be "exact" or "lazy", and "exact" with pushes; got {sparse!r} with {pushes}')
        _check_pushes(pushes, synchronization, staleness_policy)
        if pull_compression is not None and (pushes is not None or isinstance(staleness_policy, DelayCompensated)):
            other = staleness_policy if pushes is None else pushes
            raise ValueError(f"pull_compression sends other parameters than the servers have: not with {other}")
        chosen = None if compression is None else policy.as_policy(compression)
        of_pulls = None if pull_compression is None else policy.as_policy(pull_compression)
        cluster = discovery.discover(cluster_resolver)
        timeouts = timeouts or Timeouts.from_environment()
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        if cluster is not None and not cluster.is_elastic and cluster.size > 1:
            raise ClusterSpecError(
                f'this cluster has {cluster.size} workers and no parameter server: add a job "ps" to TF_CONFIG, or '
                "start with `tfdist run --ps 1`"
            )
        _check_replicas(replicas, cluster)
        member = None
        if cluster is not None and cluster.is_elastic and cluster.task.job != "evaluator":
            member = job.enter(cluster, timeouts)
            folder = None if snapshots is None else os.fspath(snapshots)
            described = synchronization, staleness_policy, data, pushes, chosen, of_pulls, sparse, replicas
            agreement.agree(member, options.of(*described, folder, snapshot_seconds))
            if cluster.task.job == "ps":
                kept = None if snapshots is None else (Path(snapshots), snapshot_seconds)
                of_all = synchronization, staleness_policy, kept, chosen, of_pulls, replicas
                of_servers = ServerOptions(*of_all, is_lazy=sparse == "lazy")
                serving.serve(member, of_servers, timeouts)
                sys.exit()
        keras_seams.install()
        if member is None:
            super().__init__(OneDevice(self, "CPU:0"))
        else:
            of_worker = WorkerOptions(
                clips=not synchronization.averages,
                prefetch=prefetch,
                pushes=pushes,
                compression=chosen,
                pull_compression=of_pulls,
                is_lazy=sparse == "lazy",
                shares_data=data == "shared",
                workers_wait=synchronization.lead() is not None,
                bound=None if synchronization.in_rounds else synchronization.lead(),
            )
            super().__init__(ServerExtended(self, member, timeouts, of_worker))

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG."""
        return self._cluster_resolver


def _check_replicas(replicas: int, cluster: Cluster | None) -> None:
    servers = 0 if cluster is None else sum(task.job == "ps" for task in cluster.tasks)
    if replicas not in (1, 2) or (replicas == 2 and servers == 1):
        raise ValueError(
            f"replicas must be 1, or 2 with two parameter servers or more; got {replicas} with {servers} (the copy of "
            "a server is on the next one)"
        )


def _check_pushes(pushes: Any, synchronization: Synchronization, policy: StalenessPolicy) -> None:
    if isinstance(pushes, ElasticAveraging) and synchronization.averages:
        raise ValueError(f"ElasticAveraging moves the servers by each push alone; got {synchronization}")
    if pushes is not None and isinstance(policy, DelayCompensated):
        raise ValueError(f"DelayCompensated corrects gradients, and {pushes} pushes none")
