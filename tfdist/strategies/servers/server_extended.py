"""The `extended` of `ParameterServerStrategy` on workers and evaluators: servers make the optimizers' updates."""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.settings import Timeouts
from tfdist.errors import TfdistError
from tfdist.parameter_server.dealing.epochs import SharedEpochs
from tfdist.parameter_server.dealing.plan import Plan
from tfdist.parameter_server.dealing.stream_reader import Stream
from tfdist.parameter_server.options.arguments import Arguments
from tfdist.parameter_server.options.pushes import ElasticAveraging, Hogwild, LocalSteps
from tfdist.parameter_server.tables.client import TableClient, TableSpec
from tfdist.parameter_server.tables.row_cache import CachePolicy
from tfdist.parameter_server.worker.client import MessageRefusedError
from tfdist.private import datasets as private_datasets
from tfdist.private import tensorflow as private
from tfdist.private.optimizers import clips_itself, variables_of
from tfdist.runtime.job_end import JobEnd
from tfdist.runtime.membership import Membership
from tfdist.strategies.abilities import Ability
from tfdist.strategies.devices import requested_device
from tfdist.strategies.embeddings.embedded_rows import rows_of
from tfdist.strategies.keras import keras_scope
from tfdist.strategies.server_abilities import UpdatesOnServers
from tfdist.strategies.servers import job_counters, keras_servers, keras_shared_data, sidecar_evaluator
from tfdist.strategies.servers.hogwild_link import HogwildLink
from tfdist.strategies.servers.local_link import ElasticLink, LocalLink
from tfdist.strategies.servers.server_link import Attachment, Link
from tfdist.strategies.servers.server_tables import ServerConnections, ServerTables

log = logging.getLogger("tfdist")


class OneDevice(private.OneDeviceExtended, Ability):
    """The `extended` of one device, on which a process without servers trains as usual."""

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        """Returns the dataset untuned: a tuner would delay the end of an epoch; see `private_datasets.not_tuned`."""
        return private_datasets.not_tuned(dataset) if isinstance(dataset, tf.data.Dataset) else dataset

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        """Returns the user's dataset, as if it had been made without the function."""
        return self._experimental_distribute_dataset(dataset_fn(self._input_context()), options)

    def _input_context(self) -> Any:
        return private.InputContext()


class ServerExtended(OneDevice, UpdatesOnServers):
    """The `extended` of one device, whose optimizers update on servers.

    Args:
        strategy: the strategy that this is the `extended` of.
        member: this task's membership in the job.
        timeouts: how long to wait for servers.
        arguments: the strategy's arguments.
        device: the device on which the worker computes.
        observes: whether this task is an evaluator, which reads and does not train.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        member: Membership,
        timeouts: Timeouts,
        arguments: Arguments,
        device: str = "CPU:0",
        observes: bool = False,
    ) -> None:
        super().__init__(strategy, device)
        for part in (keras_servers, keras_shared_data, sidecar_evaluator):
            part.install()
        self.shares_data = arguments.data == "shared"
        self.workers_wait = arguments.workers_wait
        self.bound = arguments.bound
        self._arguments = arguments
        self._end = JobEnd(member) if observes else None
        self.observes = observes
        self.reported: set[str] = set()
        self._task = self.worker = member.control.task
        self.over = threading.Event() if self._end is None else self._end.event
        ended = (lambda: None) if self._end is None else self._end.error
        self._servers = ServerConnections(member, timeouts, arguments.hierarchy, arguments.has_copies, ended)
        self._begun = job_counters.counters_of(self._servers)
        self._tables = ServerTables(self._servers, numbers=self._begun.tables)
        self._is_chief = self._task == 0
        self._links: dict[int, Link] = {}
        self._epochs: SharedEpochs | None = None
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
        """Whether this worker is the chief, which writes files."""
        return self._is_chief

    def _input_context(self) -> Any:
        """Returns the context of a worker among those that the cluster names; others read all data.

        So do all workers where `fit` deals out the batches: their data must be equal.
        """
        strategy = self._container_strategy()
        if self.shares_data or strategy.rank < 0:
            return super()._input_context()
        return private.InputContext(strategy.size, strategy.rank)

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        return super()._create_variable(requested_device.creating(next_creator, 1), **kwargs)

    def update_on_servers(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        samples: Any,
        apply: Callable[[], None],
        ticket: Any = None,
    ) -> None:
        """Makes one update; see `tfdist.strategies.server_abilities.UpdatesOnServers`."""
        if self.observes:
            raise TfdistError("this task is an evaluator, which does not train: only workers make updates")
        with tf.init_scope(), self._lock:
            if not optimizer.built:
                keras_scope.check(optimizer, variables, self._container_strategy())
                optimizer.build(variables)
            self._connect_once(optimizer)
        if optimizer in self._alone:
            apply()
        else:
            self._links[id(optimizer)].update(gradients, variables, samples, apply, ticket)

    def assigned(self, variable: Any) -> None:
        """Has the chief's next step give a value to the servers; see `tfdist.strategies.abilities.Ability`."""
        for link in list(self._links.values()):
            link.assigned(variable)

    def links(self, model: Any) -> list[Link]:
        """Returns the links of a model's optimizers; see `tfdist.strategies.server_abilities.UpdatesOnServers`."""
        if self.observes:
            self._observe(model)
        variables = {id(variable) for variable in model.variables}
        return [link for link in list(self._links.values()) if not variables.isdisjoint(link.ids)]

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        with tf.variable_creator_scope(self._create_outside_graph):
            return super()._call_for_each_replica(fn, args, kwargs)

    def _create_outside_graph(self, next_creator: Callable[..., Any], **arguments: Any) -> Any:
        """Makes a variable outside of the graph under construction.

        Variables that a `tf.function` makes get their values only once it is traced; servers need them before. It would
        also trace once more than a function that makes none.
        """
        if not tf.compat.v1.get_default_graph().building_function:
            return next_creator(**arguments)
        with tf.init_scope():
            arguments["distribute_strategy"] = self._container_strategy()
            return self._create_variable(private.new_variable, **arguments)

    @contextlib.contextmanager
    def shared_epochs(
        self, plan: Plan, when_idle: Callable[[], None], stream: Stream | None = None
    ) -> Iterator[SharedEpochs]:
        """Context in which this worker takes part in epochs whose batches are dealt to all workers."""
        self._epochs = epochs = SharedEpochs(
            lambda: self._servers.connection(0),
            self._task,
            next(self._begun.fits),
            plan,
            when_idle,
            stream if self._is_chief else None,
        )
        self.is_sharing = True
        try:
            yield epochs
        finally:
            self.is_sharing = False
            epochs.close()

    def begin_epoch(self, model: Any) -> None:
        """Makes non-trainable weights the chief's; see `tfdist.strategies.server_abilities.UpdatesOnServers`."""
        ids = {variable_id for link in list(self._links.values()) for variable_id in link.ids}
        self._begun.states.begin(model, ids, again=self.observes)

    def begin_eager_steps(self, model: Any) -> None:
        """Attaches a model's optimizer to the servers; see `tfdist.strategies.server_abilities.UpdatesOnServers`."""
        optimizers = _optimizers_of(model)
        if len(optimizers) != 1:  # only the steps tell which of several make updates
            return
        if any(rows_of(variable) is None for variable in variables_of(optimizers[0])):
            with self._lock:
                self._connect_once(optimizers[0])

    def version(self, model: Any, reads: bool = True) -> int:
        """Returns the number of updates that a model's parameters contain."""
        return sum(link.newest_version() if reads else link.session.version for link in self.links(model))

    def link_of(self, optimizer: Any) -> Link | None:
        """Returns the link of an optimizer; see `tfdist.strategies.server_abilities.UpdatesOnServers`."""
        return self._links.get(id(optimizer))

    def table(self, name: str, form: TableSpec, cache: CachePolicy | None = None) -> TableClient:
        """Returns a new table on the servers; see `tfdist.strategies.abilities.Ability`."""
        return self._tables.table(name, form, cache)

    def _observe(self, model: Any) -> None:
        """Connects an evaluator to the servers' state of a model's optimizers."""
        if not model.built:
            raise TfdistError(
                f"the evaluator cannot read the model {model.name} from the servers before it is built: give it an "
                "Input, or call it on a batch first"
            )
        for optimizer in _optimizers_of(model):
            is_models = optimizer is getattr(model.optimizer, "inner_optimizer", model.optimizer)
            with self._container_strategy().scope(), self._lock:
                if is_models and not optimizer.built:
                    optimizer.build(model.trainable_variables)
                if optimizer.built:
                    self._connect_once(optimizer)

    def _connect_once(self, optimizer: Any) -> None:
        """Makes the link of an optimizer that has none, unless this worker trains it alone."""
        if id(optimizer) not in self._links and optimizer not in self._alone:
            self._connect(optimizer)

    def _connect(self, optimizer: Any) -> None:
        """Makes the link of an optimizer, which takes over variables that other optimizers had."""
        variables = [variable for variable in variables_of(optimizer) if rows_of(variable) is None]
        servers = 1 if self._arguments.makes_updates else len(self._servers)
        _check(optimizer, variables, servers, clips=not self._arguments.averages)
        ids = {id(variable) for variable in variables}
        for number in [number for number, link in self._links.items() if not ids.isdisjoint(link.ids)]:
            self._links[number].hand_over(optimizer)
            del self._links[number]
        job_counters = self._begun
        with contextlib.ExitStack() as stack:
            connections = self._servers.of_model(stack)
            over = None if self._end is None else self._end.event
            attachment = Attachment(
                connections, self._task, self._arguments, job_counters.models, job_counters.program, over
            )
            try:
                link = self._linked(attachment, optimizer, variables)
            except MessageRefusedError as error:
                if not error.refused.is_over:
                    raise
                log.warning("tfdist: %s. This worker trains it alone.", error.refused.why)
                self._alone.add(optimizer)
                job_counters.models.append("")  # it counts for the places of later models
                return
            stack.pop_all()
        job_counters.models.append(link.name)
        self._links[id(optimizer)] = link

    def _linked(self, attachment: Attachment, optimizer: Any, variables: list[Any]) -> Link:
        """Returns a link of the kind that fits what is pushed."""
        pushes = self._arguments.pushes
        if isinstance(pushes, LocalSteps):
            return LocalLink(attachment, optimizer, variables, pushes)
        if isinstance(pushes, ElasticAveraging):
            workers = sum(task.job in ("chief", "worker") for task in self._servers.tasks)
            return ElasticLink(attachment, optimizer, variables, pushes, pushes.rate or 0.9 / workers)
        if isinstance(pushes, Hogwild):
            return HogwildLink(attachment, optimizer, variables)
        return Link(attachment, optimizer, variables)

    def _close(self) -> None:
        while self._links:
            self._links.popitem()[1].close()
        self._tables.close()


def _optimizers_of(model: Any) -> list[Any]:
    """Returns the optimizers that are attributes of a model; in place of one that scales losses, its inner one."""
    optimizers = [
        getattr(candidate, "inner_optimizer", candidate)
        for candidate in (getattr(model, "optimizer", None), *vars(model).values())
        if isinstance(candidate, keras.optimizers.Optimizer)
    ]
    return list({id(optimizer): optimizer for optimizer in optimizers}.values())


def _check(optimizer: Any, variables: list[Any], servers: int, clips: bool) -> None:
    """Checks that the servers can make an optimizer's updates.

    Raises:
        ValueError: the optimizer or a variable needs what the servers cannot do.
    """
    clips = clips and not optimizer.gradient_accumulation_steps
    if optimizer.global_clipnorm and servers > 1 and not clips:
        raise ValueError(
            f"global_clipnorm needs the norm of an average that is divided over {servers} parameter servers: use one "
            "server, or clipnorm or clipvalue, or a mode that applies every gradient by itself, such as Asynchronous()"
        )
    if clips_itself(optimizer) and servers > 1:
        raise ValueError(
            f"the optimizer {optimizer.name} clips gradients in a method of its own, which may look at those of all "
            f"variables, and these are divided over {servers} parameter servers: use one server, clipnorm or clipvalue"
        )
    overwritten = [variable.path for variable in variables if getattr(variable, "overwrite_with_gradient", False)]
    if overwritten:
        raise ValueError(f"parameter servers do not support float8 training; got {', '.join(overwritten[:3])}")
