"""`ParameterServerStrategy`: asynchronous training on parameter servers."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from tfdist.strategies import require_tensorflow

require_tensorflow()

import tensorflow as tf  # noqa: E402

from tfdist.cluster import discovery  # noqa: E402
from tfdist.cluster.settings import Timeouts, read_secret  # noqa: E402
from tfdist.errors import ClusterSpecError  # noqa: E402
from tfdist.parameter_server.client import Connection, RefusedError  # noqa: E402
from tfdist.parameter_server.curve import Keys  # noqa: E402
from tfdist.parameter_server.dealer import Plan  # noqa: E402
from tfdist.parameter_server.shared_epochs import SharedEpochs  # noqa: E402
from tfdist.parameter_server.staleness import AsItIs, StalenessPolicy  # noqa: E402
from tfdist.parameter_server.synchronization import Asynchronous, Synchronization  # noqa: E402
from tfdist.runtime import job, serving  # noqa: E402
from tfdist.runtime.membership import Membership  # noqa: E402
from tfdist.strategies import keras_seams  # noqa: E402
from tfdist.strategies import tensorflow_private as private  # noqa: E402
from tfdist.strategies.abilities import UpdatesOnServers, WritesOnce  # noqa: E402
from tfdist.strategies.server_link import Link  # noqa: E402

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
        data: "own" to train on all that `fit` is given; "shared" to deal the batches of each epoch out to the workers,
            so that every sample of an epoch counts once, whichever worker dies. All workers must then give `fit` the
            same data.
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
        data: Literal["own", "shared"] = "own",
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
        if data not in ("own", "shared"):
            raise ValueError(f'data must be "own" or "shared"; got {data!r}')
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
            options = (prefetch, data == "shared", synchronization.lead() is not None)
            super().__init__(ServerExtended(self, member, timeouts, not synchronization.averages, *options))

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
        shares_data: whether batches are dealt out to all workers.
        workers_wait: whether workers wait for each other.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        member: Membership,
        timeouts: Timeouts,
        clips: bool,
        prefetch: int = 0,
        shares_data: bool = False,
        workers_wait: bool = False,
    ) -> None:
        super().__init__(strategy, "CPU:0")
        self.shares_data = shares_data
        self.workers_wait = workers_wait
        self.reported: set[str] = set()
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
        self._epochs: SharedEpochs | None = None
        self._fits = itertools.count()
        self._alone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        atexit.register(self._close)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this worker's communication with the servers, or None."""
        failures: list[BaseException | None] = [link.failure for link in self._links.values()]
        if self._epochs is not None:
            failures.append(self._epochs.failure)
        return next((failure for failure in failures if failure is not None), None)

    @property
    def is_writer(self) -> bool:
        """The chief writes."""
        return self._is_chief

    def update_on_servers(
        self, optimizer: Any, gradients: list[Any], variables: list[Any], samples: Any, ticket: Any = None
    ) -> bool:
        """Makes one update; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        with tf.init_scope(), self._lock:
            if not optimizer.built:
                optimizer.build(variables)
            if optimizer in self._alone:
                return False
            if id(optimizer) not in self._links:
                try:
                    self._links[id(optimizer)] = self._link(optimizer, list(optimizer._trainable_variables))
                except RefusedError as error:
                    if not error.refused.is_over:
                        raise
                    log.warning("tfdist: %s. This worker trains it alone.", error.refused.why)
                    self._alone.add(optimizer)
                    return False
        self._links[id(optimizer)].update(gradients, variables, samples, ticket)
        return True

    def links(self, model: Any) -> list[Link]:
        """The links of a model's optimizers; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        variables = {id(variable) for variable in model.variables}
        return [link for link in list(self._links.values()) if not variables.isdisjoint(link.ids)]

    @contextlib.contextmanager
    def shared_epochs(self, plan: Plan, within_batches: bool, when_idle: Callable[[], None]) -> Iterator[SharedEpochs]:
        """See `tfdist.strategies.abilities.UpdatesOnServers`."""
        of = self._member.control.task, next(self._fits), plan
        self._epochs = epochs = SharedEpochs(lambda: self._connection(0), *of, within_batches, when_idle)
        self.is_sharing = True
        try:
            yield epochs
        finally:
            self.is_sharing = False
            epochs.close()

    def link_of(self, optimizer: Any) -> Link | None:
        """The link of an optimizer; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        return self._links.get(id(optimizer))

    def _link(self, optimizer: Any, variables: list[Any]) -> Link:
        _check(optimizer, variables, len(self._servers), self._clips)
        ids = {id(variable) for variable in variables}
        for number in [number for number, link in self._links.items() if not ids.isdisjoint(link.ids)]:
            self._links.pop(number).hand_over(optimizer)
        with contextlib.ExitStack() as stack:
            connections = []
            for place in range(len(self._servers)):
                connections.append(self._connection(place))
                stack.callback(connections[-1].close)  # the process could not end with one that is open
            number, is_chief = self._member.control.task, self._is_chief
            link = Link(connections, number, self._begun, optimizer, variables, is_chief, self._clips, self._prefetch)
            stack.pop_all()
        self._begun.append(link.name)
        return link

    def _connection(self, server: int) -> Connection:
        address = self._member.control.look_up(serving.address_of(self._servers[server].index))
        options = self._timeouts.heartbeat, Keys.of_secret(read_secret()), self._ended, self._name_of
        return Connection(address, f"ps {server}", *options)

    def _name_of(self, number: int) -> str:
        return str(self._tasks[number])

    def _ended(self) -> BaseException | None:
        return self._member.control.failure

    def _close(self) -> None:
        while self._links:
            self._links.popitem()[1].close()


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
