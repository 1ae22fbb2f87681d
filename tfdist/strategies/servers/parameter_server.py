"""`ParameterServerStrategy`: asynchronous training on parameter servers."""

from __future__ import annotations

import sys
from typing import Any, Literal

from tfdist.strategies import require_tensorflow

require_tensorflow()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist import other_names  # noqa: E402
from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.parameter_server.options import published  # noqa: E402
from tfdist.parameter_server.options.arguments import Arguments  # noqa: E402
from tfdist.parameter_server.options.per_host import PerHost  # noqa: E402
from tfdist.parameter_server.options.pushes import ElasticAveraging, Gradients, Hogwild, LocalSteps  # noqa: E402
from tfdist.parameter_server.options.servers import Servers  # noqa: E402
from tfdist.parameter_server.options.synchronization import Asynchronous, Synchronization  # noqa: E402
from tfdist.runtime import agreement, job, serving  # noqa: E402
from tfdist.strategies.devices import devices  # noqa: E402
from tfdist.strategies.keras import keras_seams  # noqa: E402
from tfdist.strategies.servers.cluster_check import check_cluster  # noqa: E402
from tfdist.strategies.servers.server_extended import OneDevice, ServerExtended  # noqa: E402

_ARGUMENTS = {
    "staleness_policy": "synchronization=Asynchronous(late=…), of tfdist.parameter_server",
    "prefetch": "pushes=tfdist.parameter_server.Gradients(prefetch=…)",
    "compression": "pushes=tfdist.parameter_server.Gradients(compression=…)",
    "pull_compression": "pushes=tfdist.parameter_server.Gradients(parameters=…)",
    "sparse": "pushes=tfdist.parameter_server.Gradients(sparse=…)",
    "snapshots": "servers=tfdist.parameter_server.Servers(snapshots=…)",
    "snapshot_seconds": "servers=tfdist.parameter_server.Servers(snapshot_seconds=…)",
    "replicas": "servers=tfdist.parameter_server.Servers(copies=1)",
    "hierarchy": "servers=tfdist.parameter_server.PerHost(…)",
    "variable_partitioner": "nothing: each variable is divided over all servers",
}
"""Arguments that the strategy does not take, and what to use instead."""


class ParameterServerStrategy(tf.distribute.Strategy):
    """Training of Keras models with variables and optimizers on parameter servers.

    Every task runs the same script. On a ``ps`` task this serves until the job is over, and then ends the process. The
    chief and the workers train, each on its own data, at its own pace. An evaluator reads the newest parameters, and
    evaluates. A process without parameter servers trains as usual.

    Args:
        cluster_resolver: description of the cluster; by default TF_CONFIG.
        synchronization: when updates are applied, and how late gradients are weighted: `tfdist.parameter_server`'s
            `Asynchronous`, `BoundedStaleness`, `SoftSync` or `Synchronous`.
        pushes: what workers push, and how it is sent. `tfdist.parameter_server.Gradients`: the servers make updates of
            gradients. `LocalSteps` or `ElasticAveraging`: each worker's own optimizer makes updates, and their changes
            are pushed. `Hogwild`: likewise, but workers on a server's machine change its memory directly.
        servers: how servers keep their state: `tfdist.parameter_server.Servers`, with snapshots and copies. Or
            `PerHost`: a server on each host joins the gradients of the host's workers, and ``synchronization`` is
            between hosts.
        data: "own" to train on all that `fit` is given; "shared" to deal the batches of each epoch out to the workers,
            so that every sample of an epoch counts once, whichever worker dies. All workers must then give `fit` the
            same data.
        device: the device on which a worker computes, such as "GPU:0"; by default a GPU, another one for each worker of
            a machine, or the CPU if there is none. Servers compute on the CPU.
        timeouts: how long to wait for other tasks.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument has an invalid value, or excludes another one.
        TfdistError: the chief or a server cannot be reached, or another task has other arguments.
    """

    @other_names.hint_unknown_arguments(_ARGUMENTS)
    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        *,
        synchronization: Synchronization = Asynchronous(),  # noqa: B008
        pushes: Gradients | LocalSteps | ElasticAveraging | Hogwild = Gradients(),  # noqa: B008
        servers: Servers | PerHost = Servers(),  # noqa: B008
        data: Literal["own", "shared"] = "own",
        device: str | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        arguments = Arguments(synchronization, pushes, servers, data)
        cluster = discovery.discover(cluster_resolver)
        timeouts = Timeouts.of(timeouts)
        self._cluster = cluster
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        check_cluster(arguments, cluster)
        member = None
        if cluster is not None and cluster.is_elastic:
            member = job.enter(cluster, timeouts)
            agreement.agree(member, published.describe(arguments, keras.config.floatx()))
            if cluster.task.job == "ps":
                devices.hide_gpus()
                serving.serve(member, arguments, timeouts)
                sys.exit()
        keras_seams.install_for(self)
        chosen = devices.own_devices([device] if device else None, *devices.place_on_host(cluster))[0]
        if member is None:
            super().__init__(OneDevice(self, chosen))
        else:
            observes = cluster is not None and cluster.task.job == "evaluator"
            super().__init__(ServerExtended(self, member, timeouts, arguments, chosen, observes))

    @property
    def _cluster_coordinator(self) -> Any:
        """Raises a `TypeError`: TensorFlow's coordinator, which asks for this first, is not supported."""
        raise TypeError(
            "a tf.distribute.coordinator.ClusterCoordinator schedules steps of TensorFlow's own "
            "ParameterServerStrategy. Under tfdist.ParameterServerStrategy every worker runs the whole script, and "
            "needs no coordinator: train by model.fit, or call strategy.run on each worker in a loop of your own. The "
            "chief evaluates and saves; or a task of the job `evaluator` does, with tfdist.SidecarEvaluator."
        )

    @property
    def rank(self) -> int:
        """Rank of this process among the workers that the cluster names; the chief's is 0.

        The rank is -1 in an evaluator, and in a worker that the cluster does not name.
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
