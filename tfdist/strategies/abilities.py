"""Abilities of strategies, which the seams of Keras and TensorFlow require.

A strategy's `extended` (a `tf.distribute.StrategyExtended`) inherits its abilities beside the TensorFlow class that it
extends. If it lacks an ability, the seams that require the ability do what Keras does:

| ability | seams that require it |
|---|---|
| any | saving, callbacks that write, the progress bar, `compile` in the model's scope, `DynamicEmbedding`, errors |
| `DataParallel` | data, steps, losses, gradients, metrics, layers' state, loading, the end of epochs, equal weights |
| `UpdatesOnServers` | optimizers, whose updates are made by parameter servers; `evaluate`, `predict` and saving |
| `DelaysUpdates` | optimizers, `evaluate`, the end of epochs: updates are a step late |
| `TrainsInRounds` | optimizers, whose weights are exchanged after some steps; the end of epochs, `evaluate` |
| `ElasticMembership` | the beginning and end of `fit` and of epochs, which processes may reach at different times |
| `DividesUpdates` | optimizers, whose variables are on several processes; loading |
| `DealsVariables` | optimizers: each process updates the variables that are dealt to it; `compile`, loading |
| `KeepsRows` | layers, which gather their weights when they are called, or compute with parts of them; new weights |
| `HasStages` | steps of `fit`, `evaluate` and `predict`, weights, optimizers: a process holds a part of the model |

`TrainsInRounds` and `ElasticMembership`, which are `DataParallel` as well, are in `round_abilities.py`.
"""

from __future__ import annotations

import abc
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tfdist.strategies.step_calls import StepCalls

if TYPE_CHECKING:
    from collections import Counter

    import tensorflow as tf

    from tfdist.compression.compressor import Compressor
    from tfdist.engine.bridge import Bridge
    from tfdist.engine.exchange import Exchange
    from tfdist.engine.group import ProcessGroup
    from tfdist.engine.owned import Owned
    from tfdist.parameter_server.dealing.epochs import SharedEpochs
    from tfdist.parameter_server.dealing.plan import Plan
    from tfdist.parameter_server.dealing.stream_reader import Stream
    from tfdist.parameter_server.tables.client import TableClient, TableSpec
    from tfdist.parameter_server.tables.row_cache import CachePolicy
    from tfdist.sharding import Ownership
    from tfdist.strategies.all_reduce.delayed_sums import DelayedSums
    from tfdist.strategies.data.shares import Shares
    from tfdist.strategies.divided.dealing import Dealing
    from tfdist.strategies.divided.gathering import Collectives
    from tfdist.strategies.divided.remote_variables import RemoteVariables
    from tfdist.strategies.divided.split_axis import Split
    from tfdist.strategies.keras.gradient_norms import GradientNorms
    from tfdist.strategies.servers.server_link import Link
    from tfdist.strategies.stopping import Stopping


class Ability:
    """The base of all abilities, and of every tfdist strategy."""

    if TYPE_CHECKING:  # members of TensorFlow's class that the seams use

        @property
        def worker_devices(self) -> Any:
            """The devices of this process's replicas; see `tf.distribute.StrategyExtended`."""

        @property
        def _num_replicas_in_sync(self) -> Any: ...

        def _container_strategy(self) -> Any: ...

        def _get_replica_id_in_sync_group(self, local: int) -> Any: ...

    @property
    def has_several_replicas(self) -> bool:
        """Whether there is more than one replica."""
        return self._num_replicas_in_sync > 1

    @property
    def calls_host_in_steps(self) -> bool:
        """Whether a step of training calls functions on the host, which XLA cannot compile."""
        return self.has_several_replicas

    @property
    def failure(self) -> BaseException | None:
        """The error that ended this process's communication, or None."""
        return None

    def cause_of(self, error: tf.errors.OpError) -> BaseException | None:
        """Returns the error of tfdist that an error of TensorFlow has come from, or None.

        Args:
            error: an error of a graph's operation.
        """
        return self.failure

    def holds(self, model: Any, variable: Any) -> bool:
        """Returns whether this process holds a variable of a model.

        Args:
            model: a Keras model.
            variable: a variable of the model, of its metrics or of its optimizer.
        """
        return True

    @property
    def is_writer(self) -> bool:
        """Whether this process is the writer, which writes files and shows progress."""
        return True

    @property
    def takes_part_in_saving(self) -> bool:
        """Whether each process takes part when the writer saves a model: it sends weights, or saves residuals."""
        return False

    @contextlib.contextmanager
    def local_only(self) -> Iterator[None]:
        """Context for work of the writer alone: nothing inside waits for other processes."""
        yield

    def run_on_writer(self, model: Any, action: Callable[[], Any]) -> Any:
        """Has the writer do work that needs all variables of a model; other processes only help where they must.

        Args:
            model: a Keras model.
            action: function that does the work.

        Returns:
            The result of the action; None on other processes.
        """
        if not self.is_writer:
            return None
        with self.local_only():
            return action()

    def table(self, name: str, form: TableSpec, cache: CachePolicy | None = None) -> TableClient | None:
        """Returns a table of an embedding's rows on the parameter servers; the same call on all workers shares it.

        Args:
            name: name of the embedding layer.
            form: columns, initial values and row policy of the table, equal on all workers.
            cache: which rows this worker keeps between steps; None keeps no rows.

        Returns:
            A client of the table; None in a job without servers.

        Raises:
            ValueError: this strategy cannot train rows.
            TfdistError: a server cannot be reached.
        """
        return None


class DataParallel(Ability, abc.ABC):
    """A strategy whose replicas, in one process or several, train copies of the model on shares of the global batch.

    All processes call the same collectives. Gradients are summed over all replicas before any other processing. Under
    `fit` they are weighted by samples, so that the sum is a mean. Results of metrics and logs cover all replicas, and
    layers' state is made equal on them after each Keras step and before `evaluate`. One process reads files for all.

    Attributes:
        group: the processes that are replicas of each other.
        bridge: reduces tensors over the group.
        exchange: broadcasts and gathers tensors in the group.
        stopping: requests to end the steps of an epoch early.
        step_calls: collectives of each step of the Keras method that is running.
        shares: the number of samples of each replica in the current step.
        compressor: compressor of gradients; None sends full precision.
        norms: measures the noise of gradients in steps that are traced, or run eagerly, while it is set; None measures
            nothing.
        float32_sums: whether gradients of half precision are summed in float32.
        checks_weights: whether the weights of all processes are compared after each epoch.
        synchronizes_steps: whether the processes of the group take each step together. If not, metrics and layers'
            state are merged when all have taken their steps.
        runs_in_lockstep: whether all processes call the same methods with the same arguments, and end epochs together.
        averaging_processes: number of processes that take steps on their own and average their weights; 1 if processes
            sum gradients instead.
        reader: number of this process among those that each read all data; seeds its random numbers.
        broadcasts_loaded_weights: whether the caller is inside `reading_for_all`.
    """

    group: ProcessGroup
    bridge: Bridge
    exchange: Exchange
    stopping: Stopping
    step_calls = StepCalls()
    shares: Shares
    compressor: Compressor | None = None
    norms: GradientNorms | None = None
    float32_sums = False
    checks_weights: bool
    synchronizes_steps = True
    runs_in_lockstep = True
    averaging_processes = 1
    reader = 0
    broadcasts_loaded_weights = False

    @property
    def step_bridge(self) -> Bridge:
        """The bridge that reduces tensors within Keras steps, over the processes that take each step together."""
        return self.bridge

    @property
    def all_processes(self) -> Exchange:
        """The exchange among all processes: more than the group where one replica spans several processes."""
        return self.exchange

    @property
    def is_local_only(self) -> bool:
        """Whether the caller is inside `local_only`, and must not call collectives."""
        return False

    def per_process_variables(self, model: Any) -> list[Any]:
        """Returns the variables of a model's optimizers whose values differ between processes.

        Args:
            model: a Keras model.
        """
        return []

    @abc.abstractmethod
    def count(self, optionals: list[Any]) -> tf.Tensor:
        """Counts the replicas of all processes that have another batch; records the step's samples in `shares`.

        Args:
            optionals: the local replicas' next batches, each a `tf.experimental.Optional`.

        Returns:
            The number of replicas, an int64 scalar, the same on all processes.
        """

    @abc.abstractmethod
    def reading_for_keras(self, calls: StepCalls) -> contextlib.AbstractContextManager[None]:
        """Context in which distributed datasets yield a `Share`, with a stand-in row where there are no samples.

        Args:
            calls: collectives of the steps that read the datasets.
        """

    @abc.abstractmethod
    def reading_in_order(self) -> contextlib.AbstractContextManager[None]:
        """Context in which all processes read the same batches of a dataset; gathered outputs keep its order."""

    @contextlib.contextmanager
    def reading_for_all(self) -> Iterator[None]:
        """Context in which the caller broadcasts the weights that are loaded."""
        self.broadcasts_loaded_weights = True
        try:
            yield
        finally:
            self.broadcasts_loaded_weights = False

    def await_file(self, path: Any) -> None:
        """Waits a little for a file that the writer may not have finished, where processes do not wait for each other.

        Args:
            path: path of the file.
        """


class DelaysUpdates(DataParallel):
    """A strategy that sums gradients while the next step computes, and uses the sums after that step."""

    calls_host_in_steps = True

    @abc.abstractmethod
    def delayed_sums(self, optimizer: Any, variables: list[Any]) -> DelayedSums:
        """Returns the delayed sums of an optimizer.

        Args:
            optimizer: a Keras optimizer.
            variables: variables that the optimizer has gradients of, in their order.

        Raises:
            ValueError: the optimizer had gradients of other variables before.
        """

    @abc.abstractmethod
    def delayed_of(self, model: Any) -> list[tuple[Any, DelayedSums]]:
        """Returns the optimizers that have updated variables of a model, and their delayed sums.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def staleness(self, model: Any) -> Counter[int]:
        """Returns how often each staleness occurred: the updates between a gradient's computation and its use.

        Args:
            model: a Keras model.
        """


class UpdatesOnServers(Ability, abc.ABC):
    """A strategy whose optimizers send gradients to parameter servers, which hold the optimizers' state.

    Attributes:
        worker: number of this task.
        shares_data: whether the batches of `fit` are dealt out to all workers.
        is_sharing: whether the call of `fit` under way reads batches that are dealt out.
        workers_wait: whether workers wait for each other.
        bound: largest staleness in the mode `BoundedStaleness`, in steps; None in other modes.
        observes: whether this task is an evaluator, which reads weights and does not train.
        over: event that an evaluator waits for: no task is left that trains.
        reported: messages that have been logged and are not repeated, and methods that write nothing, by name.
    """

    worker: int
    shares_data = False
    is_sharing = False
    calls_host_in_steps = True
    workers_wait = False
    bound: int | None = None
    observes = False
    over: threading.Event
    reported: set[str]

    @abc.abstractmethod
    def update_on_servers(
        self,
        optimizer: Any,
        gradients: list[Any],
        variables: list[Any],
        samples: Any,
        apply: Callable[[], None],
        ticket: Any = None,
    ) -> None:
        """Makes one update, and gives the variables their new values; in the graph under construction, or eagerly.

        Args:
            optimizer: a Keras optimizer.
            gradients: gradient of each variable: a tensor, `tf.IndexedSlices` or None.
            variables: Keras variables, in the order of the gradients.
            samples: number of samples that the gradients are a mean of; a number or a scalar tensor.
            apply: function that makes the update in this process, as Keras does.
            ticket: ticket that the batch was dealt with, an int64 scalar; None for batches that were not dealt.
        """

    @abc.abstractmethod
    def links(self, model: Any) -> list[Link]:
        """Returns the links to servers of the optimizers that have updated variables of a model.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def shared_epochs(
        self, plan: Plan, within_batches: bool, when_idle: Callable[[], None], stream: Stream | None = None
    ) -> contextlib.AbstractContextManager[SharedEpochs]:
        """Context in which this worker takes part in epochs whose batches are dealt to all workers.

        Args:
            plan: how the samples of each epoch are divided into batches.
            within_batches: whether samples are shuffled within each batch only, as for ``shuffle="batch"``.
            when_idle: function that tells all servers not to wait for this worker.
            stream: source of batches that the chief reads and sends to all workers; None if each reads its own.
        """

    @abc.abstractmethod
    def begin_epoch(self, model: Any) -> None:
        """Copies the chief's non-trainable weights to this worker before the first epoch; the chief sends its own.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def begin_eager_steps(self, model: Any) -> None:
        """Attaches a model's optimizer to the servers before an eager step, if it is the only one and is built.

        So the first gradients of a worker are those of the chief's values. A graph attaches when it is traced; other
        eager models attach in their first step, with gradients of the worker's own values.

        Args:
            model: a Keras model.
        """

    @abc.abstractmethod
    def version(self, model: Any, reads: bool = True) -> int:
        """Returns the number of updates that a model's parameters contain.

        Args:
            model: a Keras model.
            reads: whether the newest parameters are read from the servers first.
        """

    @abc.abstractmethod
    def link_of(self, optimizer: Any) -> Link | None:
        """Returns the link of an optimizer to its servers; None if the optimizer has made no update.

        Args:
            optimizer: a Keras optimizer.
        """


class DividesUpdates(DataParallel):
    """A strategy whose processes each update some of a model's variables, and keep an optimizer's variables for those.

    Attributes:
        over_updaters: bridge that reduces tensors over the processes that update the variables of one model together.
    """

    over_updaters: Bridge
    _leads = False
    """Whether this process, the writer, runs an action of `run_on_writer`."""

    @abc.abstractmethod
    def remote(self, model: Any) -> RemoteVariables:
        """Returns an object that reads and assigns the variables of all processes.

        Args:
            model: a Keras model that is built.
        """

    @property
    def takes_part_in_saving(self) -> bool:
        """Whether each process takes part when the writer saves a model: yes, since it gives its variables."""
        return True

    def run_on_writer(self, model: Any, action: Callable[[], Any]) -> Any:
        """Runs an action on the writer, while other processes give it their variables; see `Ability.run_on_writer`."""
        if self._leads:
            return action()
        remote = self.remote(model)
        if not self.is_writer:
            remote.answer()
            return None
        self._leads = True
        try:
            with remote.led(), self.local_only():
                return action()
        finally:
            self._leads = False

    @abc.abstractmethod
    def equalize(self, model: Any) -> None:
        """Gives all processes that hold a variable the value of the first of them; all processes call it.

        Args:
            model: a Keras model that is built.
        """

    @contextlib.contextmanager
    def updating(self, optimizer: Any) -> Iterator[None]:
        """Context in which an optimizer's variables are this process's parts, and all have all values after it.

        All processes enter it.

        Args:
            optimizer: Keras optimizer that updates the variables.
        """
        yield


class DealsVariables(DividesUpdates):
    """A strategy that deals the variables of each optimizer to its processes.

    Attributes:
        owned: collectives of variables that are dealt to one process each.
    """

    owned: Owned

    @abc.abstractmethod
    def deal(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Deals the variables of an optimizer, before it makes its own variables.

        Args:
            optimizer: a Keras optimizer.
            variables: variables that it will update.
        """

    @abc.abstractmethod
    def dealing(self, optimizer: Any) -> Dealing | None:
        """Returns how the variables of an optimizer are dealt; None if each process updates all of them.

        Args:
            optimizer: a Keras optimizer.
        """

    @abc.abstractmethod
    def ready(self, optimizer: Any) -> Dealing | None:
        """Returns `dealing`, after allocating the variables of a built optimizer that this process holds.

        Args:
            optimizer: a Keras optimizer.
        """

    @abc.abstractmethod
    def assign_part(self, variable: Any, value: Any) -> None:
        """Assigns this process's part of the value of an optimizer's variable, of which it may have some or nothing.

        Args:
            variable: variable of an optimizer that this process does not have whole.
            value: value of the whole variable.
        """

    @abc.abstractmethod
    def place(self, model: Any) -> None:
        """Allocates the variables that this process holds of a model's optimizers.

        Args:
            model: a Keras model.
        """


class KeepsRows(DealsVariables):
    """A strategy whose processes each keep a part of some weights of a model."""

    @abc.abstractmethod
    def parts_of_new(self, variable: Any, split: Split | None) -> tuple[Ownership, Collectives] | None:
        """Returns the part of a new weight that each process keeps, and the weight's collectives.

        Args:
            variable: a Keras variable that a layer adds; it has a shape, and no value yet.
            split: how a layer that computes in parts wants it to be split; None for other layers.

        Returns:
            None if each process keeps the whole weight.

        Raises:
            ValueError: the weight cannot be split so.
        """

    @abc.abstractmethod
    def number_of_parts(self, mesh_axis: str) -> int:
        """Returns the number of parts of weights that are split over an axis of the mesh.

        Args:
            mesh_axis: name of the axis.

        Raises:
            ValueError: the strategy has no mesh, or the mesh no such axis.
        """

    @abc.abstractmethod
    def initial_value(self, variable: Any, value: Any) -> tf.Tensor:
        """Returns the chief's initial value of a weight.

        Args:
            variable: a Keras variable that all processes make.
            value: this process's initial value.
        """


class HasStages(DividesUpdates):
    """A strategy that divides a model into stages, of which this process may hold only some."""

    calls_host_in_steps = True

    @abc.abstractmethod
    def place(self, model: Any) -> None:
        """Divides a model into stages, and allocates the variables of this process's stages.

        Args:
            model: a Keras model that is built.

        Raises:
            ValueError: the model cannot be divided.
        """

    @abc.abstractmethod
    def check_batches(self, x: Any, batch_size: int | None) -> None:
        """Checks that the batches of a training can be divided into micro-batches.

        Args:
            x: the argument ``x`` of ``fit``.
            batch_size: the argument ``batch_size`` of ``fit``.

        Raises:
            ValueError: the batches cannot be divided.
        """

    @abc.abstractmethod
    def steps_of(self, model: Any) -> Any:
        """Returns the `tfdist.pipeline.model_steps.ModelSteps` of a model, which `place` has divided.

        Args:
            model: a Keras model that is built.
        """

    @abc.abstractmethod
    def values(self, model: Any, variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables as arrays, whichever process holds them; all processes call it.

        Args:
            model: a Keras model that is built.
            variables: variables of the model or of its optimizer.
        """
