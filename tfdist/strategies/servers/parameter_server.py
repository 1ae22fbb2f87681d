"""`ParameterServerStrategy`: asynchronous training on parameter servers."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from tfdist.strategies import require_tensorflow

require_tensorflow()

import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.compression import policy  # noqa: E402
from tfdist.compression.policy import Choice, Policy, Schedule  # noqa: E402
from tfdist.parameter_server.options.per_host import PerHost  # noqa: E402
from tfdist.parameter_server.options.pushes import ElasticAveraging, Hogwild, LocalSteps  # noqa: E402
from tfdist.parameter_server.options.staleness import AsItIs, StalenessPolicy  # noqa: E402
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronization  # noqa: E402
from tfdist.runtime import agreement, job, serving  # noqa: E402
from tfdist.strategies.devices import devices  # noqa: E402
from tfdist.strategies.keras import keras_seams  # noqa: E402
from tfdist.strategies.servers.server_arguments import Arguments  # noqa: E402
from tfdist.strategies.servers.server_extended import OneDevice, ServerExtended  # noqa: E402


class ParameterServerStrategy(tf.distribute.Strategy):
    """Trains Keras models with variables and optimizers on parameter servers.

    Every task runs the same script. On a ``ps`` task this serves until the job is over, and then ends the process; the
    chief and the workers train, each on its own data, at its own pace. An evaluator reads the newest parameters, and
    evaluates. A process without parameter servers trains as usual.

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
            updates, and what they have changed is pushed. `Hogwild`: likewise, and workers on a server's machine change
            its memory themselves. None for gradients, of which the servers make updates.
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
        device: on which a worker computes, such as "GPU:0"; by default a GPU, of which the workers of a machine get
            different ones, or the CPU if there is none. Servers compute on the CPU.
        hierarchy: `tfdist.parameter_server.PerHost` for a server on each host, which joins the gradients of the host's
            workers; ``synchronization`` and ``staleness_policy`` are then between hosts. Not with ``replicas=2``,
            shared data, ``pushes``, compression, nor `DelayCompensated`. None for workers that go to all servers.
        timeouts: how long to wait for other tasks.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument is not what it may be, or does not go with another one.
        TfdistError: the chief or a server cannot be reached, or another task has other arguments.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        synchronization: Synchronization = Asynchronous(),  # noqa: B008
        staleness_policy: StalenessPolicy = AsItIs(),  # noqa: B008
        prefetch: int = 0,
        data: Literal["own", "shared"] = "own",
        pushes: LocalSteps | ElasticAveraging | Hogwild | None = None,
        compression: Choice | Schedule | Policy = None,
        pull_compression: Choice | Schedule | Policy = None,
        sparse: Literal["exact", "lazy"] = "exact",
        snapshots: str | os.PathLike[str] | None = None,
        snapshot_seconds: float = 60.0,
        replicas: int = 1,
        device: str | None = None,
        hierarchy: PerHost | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        arguments = Arguments(
            *(synchronization, staleness_policy, prefetch, data, pushes),
            None if compression is None else policy.as_policy(compression),
            None if pull_compression is None else policy.as_policy(pull_compression),
            *(sparse, snapshots, snapshot_seconds, replicas, hierarchy),
        )
        cluster = discovery.discover(cluster_resolver)
        timeouts = Timeouts.of(timeouts)
        self._cluster = cluster
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        arguments.check_cluster(cluster)
        member = None
        if cluster is not None and cluster.is_elastic:
            member = job.enter(cluster, timeouts)
            agreement.agree(member, arguments.published())
            if cluster.task.job == "ps":
                devices.hide_gpus()
                serving.serve(member, arguments.for_servers(), timeouts)
                sys.exit()
        keras_seams.install_for(self)
        chosen = devices.own_devices([device] if device else None, *devices.place_on_host(cluster))[0]
        if member is None:
            super().__init__(OneDevice(self, chosen))
        else:
            of_worker = arguments.for_workers(observes=cluster is not None and cluster.task.job == "evaluator")
            super().__init__(ServerExtended(self, member, timeouts, of_worker, chosen))

    @property
    def _cluster_coordinator(self) -> Any:
        """What TensorFlow's coordinator asks a strategy for first."""
        raise TypeError(
            "a tf.distribute.coordinator.ClusterCoordinator schedules steps of TensorFlow's own "
            "ParameterServerStrategy. Under tfdist.ParameterServerStrategy every worker runs the whole script, and "
            "needs no coordinator: train by model.fit, or call strategy.run on each worker in a loop of your own. The "
            "chief evaluates and saves; or a task of the job `evaluator` does, with tfdist.SidecarEvaluator."
        )

    @property
    def rank(self) -> int:
        """This process's place among the workers that the cluster names; the chief's is 0.

        It is -1 in an evaluator, and in a worker that the cluster does not name.
        """
        if self._cluster is None:
            return 0
        return -1 if self._cluster.rank is None else self._cluster.rank

    @property
    def size(self) -> int:
        """The number of workers that the cluster names, with the chief; 1 in a process alone."""
        return 1 if self._cluster is None else self._cluster.size

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG."""
        return self._cluster_resolver
