"""`ParameterServerStrategy`: asynchronous training on parameter servers. Under construction, and not yet public."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from tfdist.strategies import require_tensorflow

require_tensorflow()

import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.parameter_server.client import Connection  # noqa: E402
from tfdist.parameter_server.session import Session  # noqa: E402
from tfdist.parameter_server.staleness import AsItIs, StalenessPolicy  # noqa: E402
from tfdist.parameter_server.synchronization import Asynchronous, Synchronization  # noqa: E402
from tfdist.runtime import job, serving  # noqa: E402
from tfdist.runtime.membership import Membership  # noqa: E402
from tfdist.strategies import keras_seams  # noqa: E402
from tfdist.strategies import tensorflow_private as private  # noqa: E402
from tfdist.strategies.abilities import UpdatesOnServers  # noqa: E402
from tfdist.strategies.server_link import Link  # noqa: E402

_SPLITS = frozenset("SGD Adam AdamW Adamax Nadam Adagrad Adadelta RMSprop Ftrl Lion".split())
"""Optimizers whose update of a row depends on this row alone."""


class ParameterServerStrategy(tf.distribute.Strategy):
    """Trains Keras models on parameter servers. On a parameter server task it serves, and then ends the process.

    Args:
        cluster_resolver: describes the cluster; by default TF_CONFIG does.
        synchronization: when updates are applied.
        staleness_policy: what late gradients are worth.
        timeouts: how long to wait for other tasks.

    Raises:
        TfdistError: the chief or a server cannot be reached.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        synchronization: Synchronization = Asynchronous(),  # noqa: B008
        staleness_policy: StalenessPolicy = AsItIs(),  # noqa: B008
        timeouts: Timeouts | None = None,
    ) -> None:
        cluster = discovery.discover(cluster_resolver)
        timeouts = timeouts or Timeouts.from_environment()
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        member = None
        if cluster is not None and cluster.is_elastic and cluster.task.job != "evaluator":
            member = job.enter(cluster, timeouts)
            if cluster.task.job == "ps":
                serving.serve(member, synchronization, staleness_policy)
                sys.exit()
        keras_seams.install()
        super().__init__(ServerExtended(self, member, timeouts) if member else _Alone(self, "CPU:0"))

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG."""
        return self._cluster_resolver


class _Alone(private.OneDeviceExtended):
    """A process without servers trains as usual."""


class ServerExtended(private.OneDeviceExtended, UpdatesOnServers):
    """One device, whose optimizers update on servers.

    Args:
        strategy: the strategy that this is the `extended` of.
        member: this task's membership.
        timeouts: how long to wait for servers.
    """

    def __init__(self, strategy: tf.distribute.Strategy, member: Membership, timeouts: Timeouts) -> None:
        super().__init__(strategy, "CPU:0")
        assert member.cluster is not None
        self._member = member
        self._timeouts = timeouts
        self._servers = [task for task in member.cluster.tasks if task.job == "ps"]
        self._is_chief = member.control.task == 0
        self._links: dict[int, Link] = {}
        atexit.register(self._close)

    def update(self, optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
        """Makes one update on the servers; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        with tf.init_scope():
            if id(optimizer) not in self._links:
                self._links[id(optimizer)] = self._link(optimizer, variables)
        self._links[id(optimizer)].update(gradients)

    def _link(self, optimizer: Any, variables: list[Any]) -> Link:
        _check(optimizer, variables, len(self._servers))
        if not optimizer.built:
            optimizer.build(variables)
        connections = []
        for place, task in enumerate(self._servers):
            address = self._member.control.look_up(serving.address_of(task.index))
            connections.append(Connection(address, f"ps {place}", self._timeouts.heartbeat))
        session = Session(
            connections,
            self._member.control.task,
            [variable.path for variable in variables],
            [tuple(variable.shape) for variable in variables],
            [np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype) for variable in variables],
            splits=type(optimizer).__name__ in _SPLITS and not (optimizer.clipnorm or optimizer.global_clipnorm),
        )
        return Link(session, optimizer, variables, self._is_chief)

    def _close(self) -> None:
        for link in self._links.values():
            link.close()


def _check(optimizer: Any, variables: list[Any], servers: int) -> None:
    """Refuses what the servers cannot do yet.

    Raises:
        ValueError: with what the optimizer or a variable asks for.
    """
    if optimizer.use_ema:
        raise ValueError("parameter servers keep no moving average of the weights yet: set use_ema=False")
    if optimizer.global_clipnorm and servers > 1:
        raise ValueError(
            f"global_clipnorm needs the norm over all variables, which {servers} parameter servers do not have yet: "
            "use one server, or clipnorm or clipvalue"
        )
    if constrained := [variable.path for variable in variables if variable.constraint is not None]:
        raise ValueError(f"parameter servers apply no constraints yet; got one on {', '.join(constrained[:3])}")
