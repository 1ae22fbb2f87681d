"""`ParameterServerStrategy`: asynchronous training on parameter servers."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from tfdist.strategies import require_tensorflow

require_tensorflow()

import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts, read_secret  # noqa: E402
from tfdist.errors import ClusterSpecError  # noqa: E402
from tfdist.parameter_server.client import Connection, RefusedError  # noqa: E402
from tfdist.parameter_server.curve import Keys  # noqa: E402
from tfdist.parameter_server.staleness import AsItIs, StalenessPolicy  # noqa: E402
from tfdist.parameter_server.synchronization import Asynchronous, Synchronization  # noqa: E402
from tfdist.parameter_server.table_client import Form, Line, TableClient  # noqa: E402
from tfdist.runtime import job, serving  # noqa: E402
from tfdist.runtime.membership import Membership  # noqa: E402
from tfdist.strategies import keras_seams  # noqa: E402
from tfdist.strategies import tensorflow_private as private  # noqa: E402
from tfdist.strategies.abilities import UpdatesOnServers, WritesOnce  # noqa: E402
from tfdist.strategies.embedded_rows import rows_of  # noqa: E402
from tfdist.strategies.server_link import Link  # noqa: E402
from tfdist.tensors import unnumbered  # noqa: E402

log = logging.getLogger("tfdist")


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
            lack the worker's own last update, which counts as staleness. Not with `Synchronous`.
        snapshots: folder in which the servers write snapshots, and from which they go on, also a job with another
            number of servers; the same for all servers. None for no snapshots.
        snapshot_seconds: between two snapshots.
        timeouts: how long to wait for other tasks.

    Raises:
        TfdistError: the chief or a server cannot be reached.
    """

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        synchronization: Synchronization = Asynchronous(),  # noqa: B008
        staleness_policy: StalenessPolicy = AsItIs(),  # noqa: B008
        prefetch: int = 0,
        snapshots: str | os.PathLike[str] | None = None,
        snapshot_seconds: float = 60.0,
        timeouts: Timeouts | None = None,
    ) -> None:
        if "://" in str(snapshots):
            raise ValueError(f"snapshots must be a folder of a file system; got {snapshots}")
        if prefetch not in (0, 1) or (prefetch and synchronization.in_rounds):
            raise ValueError(
                f"prefetch must be 0 or 1, and 0 with Synchronous(); got {prefetch} with {synchronization}"
            )
        cluster = discovery.discover(cluster_resolver)
        timeouts = timeouts or Timeouts.from_environment()
        self._cluster_resolver = cluster_resolver or discovery.resolver_of(cluster)
        if cluster is not None and not cluster.is_elastic and cluster.size > 1:
            raise ClusterSpecError(
                f'this cluster has {cluster.size} workers and no parameter server: add a job "ps" to TF_CONFIG, or '
                "start with `tfdist run --ps 1`"
            )
        member = None
        if cluster is not None and cluster.is_elastic and cluster.task.job != "evaluator":
            member = job.enter(cluster, timeouts)
            if cluster.task.job == "ps":
                kept = None if snapshots is None else (Path(snapshots), snapshot_seconds)
                serving.serve(member, synchronization, staleness_policy, kept)
                sys.exit()
        keras_seams.install()
        if member is None:
            super().__init__(_OneDevice(self, "CPU:0"))
        else:
            super().__init__(ServerExtended(self, member, timeouts, not synchronization.averages, prefetch))

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG."""
        return self._cluster_resolver


class _OneDevice(private.OneDeviceExtended):
    """One device; a process without servers trains as usual."""

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """The dataset itself. Its tuner would keep the end of an epoch waiting; see `private.not_tuned`."""
        return private.not_tuned(dataset) if isinstance(dataset, tf.data.Dataset) else dataset


class ServerExtended(_OneDevice, UpdatesOnServers, WritesOnce):
    """One device, whose optimizers update on servers.

    Args:
        strategy: the strategy that this is the `extended` of.
        member: this task's membership.
        timeouts: how long to wait for servers.
        clips: whether every gradient is an update of its own, which is clipped by its norm before it is sent.
        prefetch: how many steps may be under way while the next one is computed.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        member: Membership,
        timeouts: Timeouts,
        clips: bool,
        prefetch: int = 0,
    ) -> None:
        super().__init__(strategy, "CPU:0")
        assert member.cluster is not None
        self._member = member
        self._timeouts = timeouts
        self._clips = clips
        self._prefetch = prefetch
        self._tasks = member.cluster.tasks
        self._servers = [task for task in self._tasks if task.job == "ps"]
        self._is_chief = member.control.task == 0
        self._links: dict[int, Link] = {}
        self._begun: list[str] = []
        self._alone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._line: Line | None = None
        self._tables: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        atexit.register(self._close)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this worker's communication with the servers, or None."""
        failures = [link.failure for link in self._links.values()] + [self._line.failure if self._line else None]
        return next((failure for failure in failures if failure is not None), None)

    @property
    def is_writer(self) -> bool:
        """The chief writes."""
        return self._is_chief

    def update_on_servers(self, optimizer: Any, gradients: list[Any], variables: list[Any], samples: Any) -> bool:
        """Makes one update; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        with tf.init_scope(), self._lock:
            if not optimizer.built:
                optimizer.build(variables)
            if optimizer in self._alone:
                return False
            if id(optimizer) not in self._links:
                try:
                    own = [variable for variable in optimizer._trainable_variables if rows_of(variable) is None]
                    self._links[id(optimizer)] = self._link(optimizer, own)
                except RefusedError as error:
                    if not error.refused.is_over:
                        raise
                    log.warning("tfdist: %s. This worker trains it alone.", error.refused.why)
                    self._alone.add(optimizer)
                    return False
        self._links[id(optimizer)].update(gradients, variables, samples)
        return True

    def links(self, model: Any) -> list[Link]:
        """The links of a model's optimizers; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        variables = {id(variable) for variable in model.variables}
        return [link for link in self._links.values() if not variables.isdisjoint(link.ids)]

    def link_of(self, optimizer: Any) -> Link | None:
        """The link of an optimizer; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        return self._links.get(id(optimizer))

    def table(self, name: str, form: Form) -> TableClient:
        """A new table on the servers; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        with self._lock:
            if self._line is None:
                with contextlib.ExitStack() as stack:
                    self._line = Line(self._connections(stack), self._member.control.task)
                    stack.pop_all()
            base = unnumbered(name)
            place = self._tables[base]
            self._tables[base] += 1
        return TableClient(self._line, f"{base}-{place}", form)

    def _link(self, optimizer: Any, variables: list[Any]) -> Link:
        _check(optimizer, variables, len(self._servers), self._clips)
        ids = {id(variable) for variable in variables}
        for number in [number for number, link in self._links.items() if not ids.isdisjoint(link.ids)]:
            self._links.pop(number).hand_over(optimizer)
        with contextlib.ExitStack() as stack:
            connections = self._connections(stack)
            number, is_chief = self._member.control.task, self._is_chief
            link = Link(connections, number, self._begun, optimizer, variables, is_chief, self._clips, self._prefetch)
            stack.pop_all()
        self._begun.append(link.name)
        return link

    def _connections(self, stack: contextlib.ExitStack) -> list[Connection]:
        """New connections to all servers. The process could not end with one that is open: ``stack`` closes them."""
        connections = []
        keys = Keys.of_secret(read_secret())
        for place, task in enumerate(self._servers):
            address = self._member.control.look_up(serving.address_of(task.index))
            options = f"ps {place}", self._timeouts.heartbeat, keys, self._ended, self._name_of
            connections.append(Connection(address, *options))
            stack.callback(connections[-1].close)
        return connections

    def _name_of(self, number: int) -> str:
        return str(self._tasks[number])

    def _ended(self) -> BaseException | None:
        return self._member.control.failure

    def _close(self) -> None:
        while self._links:
            self._links.popitem()[1].close()
        if self._line is not None:
            self._line.close()
            self._line = None


def _check(optimizer: Any, variables: list[Any], servers: int, clips: bool) -> None:
    """Refuses what the servers cannot do.

    Raises:
        ValueError: with what the optimizer or a variable asks for.
    """
    clips = clips and not optimizer.gradient_accumulation_steps
    if optimizer.global_clipnorm and servers > 1 and not clips:
        raise ValueError(
            f"global_clipnorm needs the norm of an average that lies on {servers} parameter servers: use one server, "
            "or clipnorm or clipvalue, or a mode that applies every gradient by itself, such as Asynchronous()"
        )
    overwritten = [variable.path for variable in variables if getattr(variable, "overwrite_with_gradient", False)]
    if overwritten:
        raise ValueError(f"parameter servers do not support float8 training; got {', '.join(overwritten[:3])}")
