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
from tfdist.cluster.settings import Timeouts  # noqa: E402
from tfdist.cluster.spec import Cluster  # noqa: E402
from tfdist.compression import policy  # noqa: E402
from tfdist.compression.policy import Choice, Policy, Schedule  # noqa: E402
from tfdist.errors import ClusterSpecError  # noqa: E402
from tfdist.parameter_server import options  # noqa: E402
from tfdist.parameter_server.client import RefusedError  # noqa: E402
from tfdist.parameter_server.dealing.dealer import Plan  # noqa: E402
from tfdist.parameter_server.dealing.epochs import SharedEpochs  # noqa: E402
from tfdist.parameter_server.pushes import ElasticAveraging, LocalSteps  # noqa: E402
from tfdist.parameter_server.staleness import AsItIs, DelayCompensated, StalenessPolicy  # noqa: E402
from tfdist.parameter_server.synchronization import Asynchronous, Synchronization  # noqa: E402
from tfdist.parameter_server.tables.client import Form, TableClient  # noqa: E402
from tfdist.parameter_server.tables.row_cache import CachePolicy  # noqa: E402
from tfdist.runtime import agreement, job, serving  # noqa: E402
from tfdist.runtime.membership import Membership  # noqa: E402
from tfdist.runtime.server_state import ServerOptions  # noqa: E402
from tfdist.strategies import keras_scope, keras_seams  # noqa: E402
from tfdist.strategies import tensorflow_private as private  # noqa: E402
from tfdist.strategies.abilities import KeepsTables, UpdatesOnServers, WritesOnce  # noqa: E402
from tfdist.strategies.embedded_rows import rows_of  # noqa: E402
from tfdist.strategies.layer_states import LayerStates  # noqa: E402
from tfdist.strategies.local_link import ElasticLink, LocalLink  # noqa: E402
from tfdist.strategies.server_link import Link  # noqa: E402
from tfdist.strategies.server_tables import Servers, ServerTables  # noqa: E402

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
            lack the worker's own last update, which counts as staleness. Not with `Synchronous`, nor with ``pushes``.
        data: "own" to train on all that `fit` is given; "shared" to deal the batches of each epoch out to the workers,
            so that every sample of an epoch counts once, whichever worker dies. All workers must then give `fit` the
            same data. Not with ``pushes``.
        pushes: `tfdist.parameter_server.LocalSteps` or `ElasticAveraging`: each worker's own optimizer makes its
            updates, and what they have changed is pushed. None for gradients, of which the servers make updates.
        compression: a method, schedule or policy of `tfdist.compression`, for what is pushed of dense gradients. What
            an encoding lacks is added to the worker's next one. None for no compression.
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
        chosen = None if compression is None else policy.as_policy(compression)
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
            described = synchronization, staleness_policy, data, pushes, chosen, sparse, replicas
            agreement.agree(member, options.of(*described, folder, snapshot_seconds))
            if cluster.task.job == "ps":
                kept = None if snapshots is None else (Path(snapshots), snapshot_seconds)
                lazy = sparse == "lazy"
                of_servers = ServerOptions(synchronization, staleness_policy, kept, chosen, replicas, lazy)
                serving.serve(member, of_servers, timeouts)
                sys.exit()
        keras_seams.install()
        if member is None:
            super().__init__(_OneDevice(self, "CPU:0"))
        else:
            extended = ServerExtended(
                self,
                member,
                timeouts,
                clips=not synchronization.averages,
                prefetch=prefetch,
                pushes=pushes,
                compression=chosen,
                is_lazy=sparse == "lazy",
                shares_data=data == "shared",
                workers_wait=synchronization.lead() is not None,
            )
            super().__init__(extended)

    @property
    def cluster_resolver(self) -> tf.distribute.cluster_resolver.ClusterResolver:
        """The resolver that the strategy was made with, or one made from TF_CONFIG."""
        return self._cluster_resolver


class _OneDevice(private.OneDeviceExtended):
    """One device; a process without servers trains as usual."""

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """The dataset itself. Its tuner would keep the end of an epoch waiting; see `private.not_tuned`."""
        return private.not_tuned(dataset) if isinstance(dataset, tf.data.Dataset) else dataset


class ServerExtended(_OneDevice, UpdatesOnServers, KeepsTables, WritesOnce):
    """One device, whose optimizers update on servers.

    Args:
        strategy: the strategy that this is the `extended` of.
        member: this task's membership.
        timeouts: how long to wait for servers.
        clips: whether every gradient is an update of its own, which is clipped by its norm before it is sent.
        prefetch: how many steps may be under way while the next one is computed.
        pushes: what is pushed; None for gradients.
        compression: of it; None for none.
        is_lazy: whether sparse gradients update the rows that they name alone.
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
        pushes: LocalSteps | ElasticAveraging | None = None,
        compression: Policy | None = None,
        is_lazy: bool = False,
        shares_data: bool = False,
        workers_wait: bool = False,
    ) -> None:
        super().__init__(strategy, "CPU:0")
        self.shares_data = shares_data
        self.workers_wait = workers_wait
        self.reported: set[str] = set()
        self._task = member.control.task
        self._servers = Servers(member, timeouts)
        self._tables = ServerTables(self._servers)
        self._clips = clips
        self._prefetch = prefetch
        self._pushes = pushes
        self._compression = compression
        self._is_chief = self._task == 0
        self._is_lazy = is_lazy
        self._links: dict[int, Link] = {}
        self._begun: list[str] = []
        self._epochs: SharedEpochs | None = None
        self._fits = itertools.count()
        self._states = LayerStates(lambda: self._servers.connection(0), member.control.task)
        self._alone: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()
        atexit.register(self._close)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this worker's communication with the servers, or None."""
        failures: list[BaseException | None] = [link.failure for link in self._links.values()]
        failures += [part.failure for part in (self._tables, self._epochs) if part is not None]
        return next((failure for failure in failures if failure is not None), None)

    @property
    def is_writer(self) -> bool:
        """The chief writes."""
        return self._is_chief

    def update_on_servers(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        samples: Any,
        apply: Callable[[], None],
        ticket: Any = None,
    ) -> None:
        """Makes one update; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        with tf.init_scope(), self._lock:
            if not optimizer.built:
                keras_scope.check(optimizer, variables, self._container_strategy())
                optimizer.build(variables)
            if id(optimizer) not in self._links and optimizer not in self._alone:
                self._connect(optimizer)
        if optimizer in self._alone:
            apply()
        else:
            self._links[id(optimizer)].update(gradients, variables, samples, apply, ticket)

    def links(self, model: Any) -> list[Link]:
        """The links of a model's optimizers; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        variables = {id(variable) for variable in model.variables}
        return [link for link in list(self._links.values()) if not variables.isdisjoint(link.ids)]

    @contextlib.contextmanager
    def shared_epochs(self, plan: Plan, within_batches: bool, when_idle: Callable[[], None]) -> Iterator[SharedEpochs]:
        """See `tfdist.strategies.abilities.UpdatesOnServers`."""
        of = self._task, next(self._fits), plan
        self._epochs = epochs = SharedEpochs(lambda: self._servers.connection(0), *of, within_batches, when_idle)
        self.is_sharing = True
        try:
            yield epochs
        finally:
            self.is_sharing = False
            epochs.close()

    def begin_epoch(self, model: Any) -> None:
        """Makes non-trainable weights the chief's; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        self._states.begin(model, {one for link in list(self._links.values()) for one in link.ids})

    def link_of(self, optimizer: Any) -> Link | None:
        """The link of an optimizer; see `tfdist.strategies.abilities.UpdatesOnServers`."""
        return self._links.get(id(optimizer))

    def table(self, name: str, form: Form, cache: CachePolicy | None = None) -> TableClient:
        """A new table on the servers; see `tfdist.strategies.abilities.KeepsTables`."""
        return self._tables.table(name, form, cache)

    def _connect(self, optimizer: Any) -> None:
        """Makes the link of an optimizer, which takes its variables over from others."""
        variables = [variable for variable in optimizer._trainable_variables if rows_of(variable) is None]
        _check(optimizer, variables, len(self._servers) if self._pushes is None else 1, self._clips)
        ids = {id(variable) for variable in variables}
        for number in [number for number, link in self._links.items() if not ids.isdisjoint(link.ids)]:
            self._links.pop(number).hand_over(optimizer)
        with contextlib.ExitStack() as stack:
            connections = self._servers.connections(stack)
            options = self._is_chief, self._clips, self._prefetch, self._compression, self._is_lazy
            try:
                link = self._linked((connections, self._task, self._begun, optimizer, variables, *options))
            except RefusedError as error:
                if not error.refused.is_over:
                    raise
                log.warning("tfdist: %s. This worker trains it alone.", error.refused.why)
                self._alone.add(optimizer)
                return
            stack.pop_all()
        self._begun.append(link.name)
        self._links[id(optimizer)] = link

    def _linked(self, arguments: tuple[Any, ...]) -> Link:
        """The link for what is pushed."""
        if isinstance(self._pushes, LocalSteps):
            return LocalLink(self._pushes, *arguments)
        if isinstance(self._pushes, ElasticAveraging):
            workers = sum(task.job in ("chief", "worker") for task in self._servers.tasks)
            return ElasticLink(self._pushes.rate or 0.9 / workers, self._pushes, *arguments)
        return Link(*arguments)

    def _close(self) -> None:
        while self._links:
            self._links.popitem()[1].close()
        self._tables.close()


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
